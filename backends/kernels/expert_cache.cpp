// An expert lies at its place among all weights, as in the file, so products find it as if all were in memory. Pages
// of what was used least recently go back to the system; several threads read, for disks want many requests at once.
//
// A prompt asks a layer for most of its experts, and then the next one. Were those kept that were asked for last, these
// would be the last layers' when an answer begins. So what counts is the last token that used an expert.
#include "expert_cache.h"

#ifndef _WIN32

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <tuple>

#include "packed_memory.h"

namespace edgespec {
namespace {

constexpr int kReaders = 8;  // memory/device/disk.py has what one to 16 gave
constexpr int kEnded = -1;

using Clock = std::chrono::steady_clock;

uint64_t since(Clock::time_point then) { return uint64_t(std::chrono::nanoseconds(Clock::now() - then).count()); }

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

constexpr int64_t kNever = -1;

struct Expert {
    int layer;
    size_t number;  // in its layer
    std::vector<Slab*> slabs = {};
    size_t bytes = 0;
    int64_t used = kNever;  // by which of the layer's tokens, last
    bool is_kept = false;
    uint64_t wanted_by = 0;  // the last request

    Expert(int layer, size_t number) : layer(layer), number(number) {}
};

struct LessRecent {
    bool operator()(const Expert* one, const Expert* other) const {
        return std::tie(one->used, one->layer, one->number) < std::tie(other->used, other->layer, other->number);
    }
};

struct Layer {
    std::deque<Expert> experts = {};
    const void* first = nullptr;  // the tensor that steps ask for first
    int64_t counted_from = 0;
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
            std::deque<Expert>& experts = layers_[size_t(one.layer)].experts;
            while (experts.size() < size_t(one.experts)) experts.emplace_back(one.layer, experts.size());
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

    void count() {
        std::lock_guard<std::mutex> lock(mutex_);
        for (Layer& layer : layers_) layer.counted_from = step_ + step_tokens_;
        std::fill(std::begin(counts_.again), std::end(counts_.again), 0);
        std::fill(std::begin(counts_.first), std::end(counts_.first), 0);
    }

    void request(const void* weights, const std::vector<ExpertUse>& uses, int64_t tokens) {
        std::unique_lock<std::mutex> lock(mutex_);
        Tensor& tensor = tensors_.at(weights);
        Layer& layer = layers_[size_t(tensor.layer)];
        if (!layer.first) layer.first = weights;
        std::vector<Expert*> wanted;
        requests_++;
        for (const ExpertUse& use : uses) {
            Expert& expert = layer.experts[size_t(use.expert)];
            if (expert.wanted_by != requests_) wanted.push_back(&expert);
            expert.wanted_by = requests_;
        }
        if (layer.first == weights) use_experts(tensor.layer, uses, tokens);
        for (Expert* expert : wanted) {
            if (expert->is_kept) continue;
            make_room(expert->bytes, lock);
            kept_bytes_ += expert->bytes;
            kept_.insert(expert);
            expert->is_kept = true;
        }
        read_absent(tensor.slabs, uses);  // what is multiplied now
        for (auto& [_, other] : tensors_)
            if (other.layer == tensor.layer) read_absent(other.slabs, uses);
        lock.unlock();
        queued_.notify_all();
    }

    bool is_here(const void* weights, int64_t expert) {
        return tensors_.at(weights).slabs[size_t(expert)].state != kReading;
    }

    void wait(const void* weights, int64_t expert) {
        if (is_here(weights, expert)) return;
        const Clock::time_point began = Clock::now();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return is_here(weights, expert); });
        counts_.waited_ns += since(began);
    }

   private:
    // Has experts be as recent as their tokens, and counts them. Of a prompt the last layer may have the last token alone,
    // as nobody asks what comes behind others: its experts grow no older by these.
    void use_experts(int number, const std::vector<ExpertUse>& uses, int64_t tokens) {
        Layer& layer = layers_[size_t(number)];
        if (number <= step_layer_) step_ += step_tokens_;
        if (number <= step_layer_ || step_layer_ < 0) step_tokens_ = tokens;
        step_layer_ = number;
        if (const int64_t others = step_tokens_ - tokens) {
            for (Expert& expert : layer.experts)
                if (expert.used != kNever) set_used(expert, expert.used + others);
            layer.counted_from += others;
        }
        for (const ExpertUse& use : uses) {
            Expert& expert = layer.experts[size_t(use.expert)];
            const int64_t now = step_ + step_tokens_ - tokens + use.token;
            const bool is_again = expert.used >= layer.counted_from;
            const int64_t tokens_ago = now - (is_again ? expert.used : layer.counted_from);
            uint32_t* counts = is_again ? counts_.again : counts_.first;
            const size_t last = std::size(counts_.again) - 1;
            if (tokens_ago > 0) counts[std::min(last, size_t(8 * std::log2(double(tokens_ago))))]++;
            set_used(expert, now);
        }
    }

    void set_used(Expert& expert, int64_t token) {
        if (expert.is_kept) kept_.erase(&expert);
        expert.used = token;
        if (expert.is_kept) kept_.insert(&expert);
    }

    void read_absent(std::deque<Slab>& slabs, const std::vector<ExpertUse>& uses) {
        for (const ExpertUse& use : uses) {
            Slab& slab = slabs[size_t(use.expert)];
            if (slab.state == kReading || slab.state == kHere) continue;
            slab.state = kReading;
            queue_.push_back(&slab);
        }
    }

    // Gives up what was used least recently; nothing that this request wants, though it be too large.
    void make_room(size_t bytes, std::unique_lock<std::mutex>& lock) {
        for (auto next = kept_.begin(); next != kept_.end() && kept_bytes_ + bytes > most_bytes_;) {
            Expert& oldest = **next;
            if (oldest.wanted_by == requests_) {
                ++next;
                continue;
            }
            for (Slab* slab : oldest.slabs) {
                done_.wait(lock, [&] { return slab->state != kReading; });
                madvise(slab->begin, slab->bytes, MADV_DONTNEED);
                slab->state = kAbsent;
            }
            kept_bytes_ -= oldest.bytes;
            oldest.is_kept = false;
            next = kept_.erase(next);
        }
    }

    void read() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            queued_.wait(lock, [&] { return is_ended_ || !queue_.empty(); });
            if (is_ended_) return;
            Slab& slab = *queue_.front();
            queue_.pop_front();
            if (reading_++ == 0) reading_since_ = Clock::now();
            lock.unlock();
            const int problem = read_all(file_, slab.begin, slab.bytes, size_t(slab.begin - begin_));
            lock.lock();
            if (--reading_ == 0) counts_.busy_ns += since(reading_since_);
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
    std::vector<Layer> layers_;
    std::vector<std::thread> readers_;

    std::mutex mutex_;  // of what is below, and of what changes in experts
    std::condition_variable queued_, done_;
    std::deque<Slab*> queue_;
    int reading_ = 0;
    Clock::time_point reading_since_;
    std::set<Expert*, LessRecent> kept_;
    size_t kept_bytes_ = 0;
    uint64_t requests_ = 0;
    int step_layer_ = -1;                 // that was asked last
    int64_t step_ = 0, step_tokens_ = 0;  // the first token of a step, how many it has
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

void count_experts(const void* begin) {
    if (ExpertCache* cache = expert_cache_of(begin)) cache->count();
}

void request_experts(ExpertCache& cache, const void* weights, const std::vector<ExpertUse>& uses, int64_t tokens) {
    cache.request(weights, uses, tokens);
}

bool is_here(ExpertCache& cache, const void* weights, int64_t expert) { return cache.is_here(weights, expert); }

void wait_for_expert(ExpertCache& cache, const void* weights, int64_t expert) { cache.wait(weights, expert); }

}  // namespace edgespec

#else

namespace edgespec {

ExpertCache* expert_cache_of(const void*) { return nullptr; }
int hold_experts(void*, size_t, int, size_t, const std::vector<ExpertTensor>&) { return -1; }
void release_experts(const void*) {}
ExpertCounts expert_counts(const void*) { return {}; }
void count_experts(const void*) {}
void request_experts(ExpertCache&, const void*, const std::vector<ExpertUse>&, int64_t) {}
bool is_here(ExpertCache&, const void*, int64_t) { return true; }
void wait_for_expert(ExpertCache&, const void*, int64_t) {}

}  // namespace edgespec

#endif
