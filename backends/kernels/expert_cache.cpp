// An expert lies at its place among all weights, as in the file, so products find it as if all were in memory. Pages
// of what was used least recently go back to the system; several threads read, for disks want many requests at once.
#include "expert_cache.h"

#ifndef _WIN32

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "packed_memory.h"

namespace edgespec {
namespace {

constexpr int kReaders = 8;  // memory/device/disk.py has what one to 16 gave
constexpr int kEnded = -1;

// Reads bytes of a file to where they go; 0, errno or kEnded.
int read_all(int file, uint8_t* to, size_t size, size_t offset) {
    while (size > 0) {
        const ssize_t count = pread(file, to, size, off_t(offset));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return count < 0 ? errno : kEnded;
        to += count, offset += size_t(count), size -= size_t(count);
    }
    return 0;
}

// Another handle of an open file, past the page cache where the file system can: it would keep a second copy.
int reopen(int file) {
#ifdef O_DIRECT
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    const int direct = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (direct >= 0) return direct;
#endif
    return dup(file);
}

enum State : uint8_t { kAbsent, kReading, kHere, kFailed };

// An expert's part of one tensor.
struct Slab {
    uint8_t* begin;
    size_t bytes;
    std::atomic<State> state{kAbsent};

    Slab(uint8_t* begin, size_t bytes) : begin(begin), bytes(bytes) {}
};

struct Expert {
    std::vector<Slab*> slabs;
    size_t bytes = 0;
    std::list<Expert*>::iterator place;  // where it is kept
    bool is_kept = false;
    uint64_t wanted_by = 0;  // the last request
};

struct Tensor {
    int layer;
    std::deque<Slab> slabs;
};

}  // namespace

class ExpertCache {
   public:
    ExpertCache(uint8_t* begin, size_t size, int file, size_t most_bytes, const std::vector<ExpertTensor>& tensors)
        : begin_(begin), size_(size), file_(file), most_bytes_(most_bytes) {
        for (const ExpertTensor& one : tensors) {
            Tensor& tensor = tensors_[one.begin];
            tensor.layer = one.layer;
            layers_.resize(std::max(layers_.size(), size_t(one.layer) + 1));
            std::deque<Expert>& experts = layers_[size_t(one.layer)];
            experts.resize(std::max(experts.size(), size_t(one.experts)));
            for (size_t e = 0; e < size_t(one.experts); e++) {
                tensor.slabs.emplace_back(one.begin + e * one.slab_bytes, one.slab_bytes);
                experts[e].slabs.push_back(&tensor.slabs.back());
                experts[e].bytes += one.slab_bytes;
            }
        }
    }

    ~ExpertCache() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_ended_ = true;
        }
        queued_.notify_all();
        for (std::thread& one : readers_) one.join();
        close(file_);
    }

    // As many readers as there may be threads; false: not one.
    bool start() {
        try {
            while (readers_.size() < kReaders) readers_.emplace_back([this] { read(); });
        } catch (const std::system_error&) {
        }
        return !readers_.empty();
    }

    bool has(const void* at) const { return at >= begin_ && at < begin_ + size_; }

    ExpertCounts take_counts() {
        std::lock_guard<std::mutex> lock(mutex_);
        const ExpertCounts found = counts_;
        counts_.problem = 0;
        return found;
    }

    void request(const void* weights, const std::vector<int64_t>& numbers) {
        std::unique_lock<std::mutex> lock(mutex_);
        Tensor& tensor = tensors_.at(weights);
        std::deque<Expert>& layer = layers_[size_t(tensor.layer)];
        const bool is_full = kept_bytes_ + layer[0].bytes > most_bytes_;
        if (is_full && &tensor.slabs[0] == layer[0].slabs[0]) counts_.used += numbers.size();  // once a layer
        requests_++;
        for (int64_t number : numbers) {  // those that are here first: the others take no place of theirs
            Expert& expert = layer[size_t(number)];
            expert.wanted_by = requests_;
            if (expert.is_kept) kept_.splice(kept_.begin(), kept_, expert.place);
        }
        for (int64_t number : numbers) {
            Expert& expert = layer[size_t(number)];
            if (expert.is_kept) continue;
            make_room(expert.bytes, lock);
            kept_bytes_ += expert.bytes;
            expert.place = kept_.insert(kept_.begin(), &expert);
            expert.is_kept = true;
            if (is_full) counts_.read++;
        }
        read_absent(tensor.slabs, numbers);  // what is multiplied now
        for (auto& [_, other] : tensors_)
            if (other.layer == tensor.layer) read_absent(other.slabs, numbers);
        lock.unlock();
        queued_.notify_all();
    }

    bool is_here(const void* weights, int64_t expert) {
        return tensors_.at(weights).slabs[size_t(expert)].state != kReading;
    }

    void wait(const void* weights, int64_t expert) {
        if (is_here(weights, expert)) return;
        const auto began = std::chrono::steady_clock::now();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return is_here(weights, expert); });
        counts_.waited_ns += uint64_t(std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count());
    }

   private:
    void read_absent(std::deque<Slab>& slabs, const std::vector<int64_t>& numbers) {
        for (int64_t number : numbers) {
            Slab& slab = slabs[size_t(number)];
            if (slab.state == kReading || slab.state == kHere) continue;
            slab.state = kReading;
            queue_.push_back(&slab);
        }
    }

    // Gives up what was used least recently; nothing that this request wants, though it be too large.
    void make_room(size_t bytes, std::unique_lock<std::mutex>& lock) {
        while (!kept_.empty() && kept_bytes_ + bytes > most_bytes_ && kept_.back()->wanted_by != requests_) {
            Expert& last = *kept_.back();
            for (Slab* slab : last.slabs) {
                done_.wait(lock, [&] { return slab->state != kReading; });
                madvise(slab->begin, slab->bytes, MADV_DONTNEED);
                slab->state = kAbsent;
            }
            kept_bytes_ -= last.bytes;
            last.is_kept = false;
            kept_.pop_back();
        }
    }

    void read() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            queued_.wait(lock, [&] { return is_ended_ || !queue_.empty(); });
            if (is_ended_) return;
            Slab& slab = *queue_.front();
            queue_.pop_front();
            lock.unlock();
            const int problem = read_all(file_, slab.begin, slab.bytes, size_t(slab.begin - begin_));
            lock.lock();
            counts_.read_bytes += slab.bytes;
            if (problem) counts_.problem = problem;
            slab.state = problem ? kFailed : kHere;
            done_.notify_all();
        }
    }

    uint8_t* const begin_;
    const size_t size_;
    const int file_;
    const size_t most_bytes_;
    std::map<const void*, Tensor> tensors_;  // by where they begin
    std::vector<std::deque<Expert>> layers_;
    std::vector<std::thread> readers_;

    std::mutex mutex_;  // of what is below, and of what changes in experts
    std::condition_variable queued_, done_;
    std::deque<Slab*> queue_;
    std::list<Expert*> kept_;  // those used last first
    size_t kept_bytes_ = 0;
    uint64_t requests_ = 0;
    ExpertCounts counts_ = {};
    bool is_ended_ = false;
};

namespace {

std::mutex all_mutex;
std::vector<std::unique_ptr<ExpertCache>> all;
std::atomic<bool> has_any = false;  // steps of other models do not ask for the mutex

// Takes what lies between the tensors of experts, in their order, into memory.
int read_others(uint8_t* begin, size_t size, int file, std::vector<ExpertTensor> tensors) {
    std::sort(tensors.begin(), tensors.end(), [](auto& one, auto& other) { return one.begin < other.begin; });
    tensors.push_back({begin + size, 0, 0, 0});
    uint8_t* at = begin;
    for (const ExpertTensor& next : tensors) {
#ifdef MADV_HUGEPAGE
        madvise(at, size_t(next.begin - at), MADV_HUGEPAGE);
        madvise(next.begin, next.slab_bytes * size_t(next.experts), MADV_NOHUGEPAGE);  // which reach into neighbours
#endif
        if (int problem = read_all(file, at, size_t(next.begin - at), size_t(at - begin))) return problem;
        at = next.begin + next.slab_bytes * size_t(next.experts);
    }
    return 0;
}

}  // namespace

ExpertCache* expert_cache_of(const void* weights) {
    if (!has_any) return nullptr;
    std::lock_guard<std::mutex> lock(all_mutex);
    for (const std::unique_ptr<ExpertCache>& one : all)
        if (one->has(weights)) return one.get();
    return nullptr;
}

int hold_experts(void* begin, size_t size, int file, size_t most_bytes, const std::vector<ExpertTensor>& tensors) {
    const int own = reopen(file);
    if (own < 0) return errno;
    uint8_t* bytes = static_cast<uint8_t*>(begin);
    auto cache = std::make_unique<ExpertCache>(bytes, size, own, most_bytes, tensors);
    if (!cache->start()) return EAGAIN;
    if (!renew_pages(begin, size)) return errno;
    if (int problem = read_others(bytes, size, file, tensors)) return problem;
    std::lock_guard<std::mutex> lock(all_mutex);
    all.push_back(std::move(cache));
    has_any = true;
    return 0;
}

void release_experts(const void* begin) {
    std::lock_guard<std::mutex> lock(all_mutex);
    all.erase(std::remove_if(all.begin(), all.end(), [&](auto& one) { return one->has(begin); }), all.end());
    has_any = !all.empty();
}

ExpertCounts expert_counts(const void* begin) {
    ExpertCache* cache = expert_cache_of(begin);
    return cache ? cache->take_counts() : ExpertCounts{};
}

void request_experts(ExpertCache& cache, const void* weights, const std::vector<int64_t>& experts) { cache.request(weights, experts); }

bool is_here(ExpertCache& cache, const void* weights, int64_t expert) { return cache.is_here(weights, expert); }

void wait_for_expert(ExpertCache& cache, const void* weights, int64_t expert) { cache.wait(weights, expert); }

}  // namespace edgespec

#else

namespace edgespec {

ExpertCache* expert_cache_of(const void*) { return nullptr; }
int hold_experts(void*, size_t, int, size_t, const std::vector<ExpertTensor>&) { return -1; }
void release_experts(const void*) {}
ExpertCounts expert_counts(const void*) { return {}; }
void request_experts(ExpertCache&, const void*, const std::vector<int64_t>&) {}
bool is_here(ExpertCache&, const void*, int64_t) { return true; }
void wait_for_expert(ExpertCache&, const void*, int64_t) {}

}  // namespace edgespec

#endif
