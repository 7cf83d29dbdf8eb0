// Experts lie in the memory that would have all of them: at any place of their size, from the lowest one on. One that is
// given up leaves its place, with its pages, to the next one, which is read into them: new pages would be zeroed first,
// and memory that is filled from below can be huge pages. Several threads read, for disks want many requests at once.
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
constexpr int64_t kPromptTokens = 64;  // of a step, which wakes a good part of a layer
constexpr size_t kHuge = 2 << 20;
constexpr size_t kHugeFrom = 256 << 20;  // bytes of experts, of which a huge page is less than a hundredth

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

enum State : uint8_t { kAbsent, kAhead, kReading, kHere, kFailed };

// An expert's part of one tensor.
struct Slab {
    size_t offset, bytes;  // in the file
    uint8_t* place = nullptr;
    std::atomic<State> state{kAbsent};

    Slab(size_t offset, size_t bytes) : offset(offset), bytes(bytes) {}
};

// Places of one size that nobody has: those with pages, and others, the lowest of which is last.
struct Places {
    std::vector<uint8_t*> filled = {}, fresh = {};
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
                uint8_t* place = one.begin + e * one.slab_bytes;
                tensor.slabs.emplace_back(size_t(place - begin), one.slab_bytes);
                experts[e].slabs.push_back(&tensor.slabs.back());
                experts[e].bytes += one.slab_bytes;
                places_[one.slab_bytes].fresh.push_back(place);
            }
        }
        for (auto& [_, one] : places_) std::sort(one.fresh.rbegin(), one.fresh.rend());
        // Of several sizes some places are given back, whose huge pages the system may fill again.
        is_huge_ = places_.size() == 1 && most_bytes_ >= kHugeFrom;
        if (is_huge_) most_bytes_ -= kHuge;  // the last one has room left
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

    bool is_huge() const { return is_huge_; }

    bool has(const void* at) const { return at >= begin_ && at < begin_ + size_; }

    bool reads(const void* weights) const { return tensors_.count(weights) > 0; }

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
        for (Expert* expert : wanted)
            if (!expert->is_kept) keep(*expert, lock);
        read_absent(tensor.slabs, uses);  // what is multiplied now
        for (auto& [_, other] : tensors_)
            if (other.layer == tensor.layer) read_absent(other.slabs, uses);
        if (layer.first == weights && tokens >= kPromptTokens) read_ahead(size_t(tensor.layer) + 1, wanted.size(), lock);
        lock.unlock();
        queued_.notify_all();
    }

    bool is_here(const void* weights, int64_t expert) {
        return tensors_.at(weights).slabs[size_t(expert)].state != kReading;
    }

    const uint8_t* wait(const void* weights, int64_t expert) {
        const Slab& slab = tensors_.at(weights).slabs[size_t(expert)];
        if (slab.state != kReading) return slab.place;
        const Clock::time_point began = Clock::now();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return slab.state != kReading; });
        counts_.waited_ns += since(began);
        return slab.place;
    }

   private:
    // Has memory keep an expert, whose slabs are to be read.
    void keep(Expert& expert, std::unique_lock<std::mutex>& lock) {
        make_room(expert.bytes, lock);
        kept_bytes_ += expert.bytes;
        kept_.insert(&expert);
        expert.is_kept = true;
        for (Slab* slab : expert.slabs) slab->place = take_place(slab->bytes);
    }

    // While this layer computes, has as many experts of the next one read as this one wants, those that were used last
    // first. What the disk had no time for when that layer is asked for is forgotten. The last layer has the last token
    // of a prompt alone.
    void read_ahead(size_t number, size_t most, std::unique_lock<std::mutex>& lock) {
        for (Slab* slab : ahead_)
            if (slab->state == kAhead) slab->state = kAbsent;
        ahead_.clear();
        if (number + 1 >= layers_.size()) return;
        std::vector<Expert*> likely;
        for (Expert& expert : layers_[number].experts) likely.push_back(&expert);
        std::stable_sort(likely.begin(), likely.end(), [](Expert* one, Expert* other) { return one->used > other->used; });
        likely.resize(std::min(most, likely.size()));
        for (Expert* expert : likely) expert->wanted_by = requests_;
        for (Expert* expert : likely) {
            if (!expert->is_kept) make_room(expert->bytes, lock);
            if (!expert->is_kept && kept_bytes_ + expert->bytes > most_bytes_) return;
            if (!expert->is_kept) keep(*expert, lock);
            for (Slab* slab : expert->slabs) {
                if (slab->state == kReading || slab->state == kHere) continue;
                slab->state = kAhead;
                ahead_.push_back(slab);
            }
        }
    }

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
                slab->state = kAbsent;
                leave_place(slab->place, slab->bytes);
            }
            kept_bytes_ -= oldest.bytes;
            oldest.is_kept = false;
            next = kept_.erase(next);
        }
    }

    // One with pages, or another one. Where there is no room for more pages those of other sizes are given back.
    uint8_t* take_place(size_t bytes) {
        Places& places = places_[bytes];
        std::vector<uint8_t*>& from = places.filled.empty() ? places.fresh : places.filled;
        uint8_t* place = from.back();
        from.pop_back();
        if (&from == &places.filled) return place;
        for (auto& [size, other] : places_) {
            while (!other.filled.empty() && held_bytes_ + bytes > most_bytes_) {
                give_back(other.filled.back(), size);
                other.filled.pop_back();
            }
        }
        held_bytes_ += bytes;
        return place;
    }

    void leave_place(uint8_t* place, size_t bytes) {
        if (held_bytes_ > most_bytes_)  // a request was too large
            give_back(place, bytes);
        else
            places_[bytes].filled.push_back(place);
    }

    void give_back(uint8_t* place, size_t bytes) {
        madvise(place, bytes, MADV_DONTNEED);
        places_[bytes].fresh.push_back(place);
        held_bytes_ -= bytes;
    }

    void read() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            queued_.wait(lock, [&] { return is_ended_ || !queue_.empty() || !ahead_.empty(); });
            if (is_ended_) return;
            std::deque<Slab*>& queue = queue_.empty() ? ahead_ : queue_;
            Slab& slab = *queue.front();
            queue.pop_front();
            if (&queue == &ahead_ && slab.state != kAhead) continue;  // it was asked for meanwhile
            slab.state = kReading;
            if (reading_++ == 0) reading_since_ = Clock::now();
            lock.unlock();
            const int problem = read_all(file_, slab.place, slab.bytes, slab.offset);
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
    size_t most_bytes_;
    bool is_huge_ = false;
    std::map<const void*, Tensor> tensors_;  // by where they begin
    std::vector<Layer> layers_;
    std::vector<std::thread> readers_;

    std::mutex mutex_;  // of what is below, and of what changes in experts
    std::condition_variable queued_, done_;
    std::deque<Slab*> queue_, ahead_;  // that are asked for, and that may be
    int reading_ = 0;
    Clock::time_point reading_since_;
    std::set<Expert*, LessRecent> kept_;
    std::map<size_t, Places> places_;          // by their bytes
    size_t kept_bytes_ = 0, held_bytes_ = 0;  // of experts, of places with pages
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

// Takes what lies between the tensors of experts into memory; many pieces at once, as of experts.
int read_others(uint8_t* begin, size_t size, int file, [[maybe_unused]] bool is_huge, std::vector<ExpertTensor> tensors) {
    std::sort(tensors.begin(), tensors.end(), [](auto& one, auto& other) { return one.begin < other.begin; });
    tensors.push_back({begin + size, 0, 0, 0});
    std::vector<std::pair<uint8_t*, size_t>> pieces;
    uint8_t* at = begin;
    for (const ExpertTensor& next : tensors) {
#ifdef MADV_HUGEPAGE
        madvise(at, size_t(next.begin - at), MADV_HUGEPAGE);
        madvise(next.begin, next.slab_bytes * size_t(next.experts), is_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
        for (; at < next.begin; at += pieces.back().second) pieces.emplace_back(at, std::min(kHuge, size_t(next.begin - at)));
        at = next.begin + next.slab_bytes * size_t(next.experts);
    }
    std::atomic<size_t> taken{0};
    std::atomic<int> problem{0};
    auto read_some = [&] {
        for (size_t i; (i = taken++) < pieces.size() && !problem;)
            if (int found = read_all(file, pieces[i].first, pieces[i].second, size_t(pieces[i].first - begin))) problem = found;
    };
    std::vector<std::thread> readers;
    try {
        while (readers.size() < kReaders) readers.emplace_back(read_some);
    } catch (const std::system_error&) {  // a limit on threads: this one reads, too
    }
    read_some();
    for (std::thread& one : readers) one.join();
    return problem;
}

// The cache of memory that has this place.
ExpertCache* cache_at(const void* at) {
    if (!has_any) return nullptr;
    std::lock_guard<std::mutex> lock(all_mutex);
    for (const std::unique_ptr<ExpertCache>& one : all)
        if (one->has(at)) return one.get();
    return nullptr;
}

}  // namespace

ExpertCache* expert_cache_of(const void* weights) {
    ExpertCache* cache = cache_at(weights);
    return cache && cache->reads(weights) ? cache : nullptr;
}

int hold_experts(void* begin, size_t size, int file, size_t most_bytes, const std::vector<ExpertTensor>& tensors) {
    const int own = reopen(file);
    if (own < 0) return errno;
    uint8_t* bytes = static_cast<uint8_t*>(begin);
    auto cache = std::make_unique<ExpertCache>(bytes, size, own, most_bytes, tensors);
    if (!cache->start()) return EAGAIN;
    if (!renew_pages(begin, size)) return errno;
    if (int problem = read_others(bytes, size, file, cache->is_huge(), tensors)) return problem;
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
    ExpertCache* cache = cache_at(begin);
    return cache ? cache->take_counts() : ExpertCounts{};
}

void count_experts(const void* begin) {
    if (ExpertCache* cache = cache_at(begin)) cache->count();
}

void request_experts(ExpertCache& cache, const void* weights, const std::vector<ExpertUse>& uses, int64_t tokens) {
    cache.request(weights, uses, tokens);
}

bool is_here(ExpertCache& cache, const void* weights, int64_t expert) { return cache.is_here(weights, expert); }

const uint8_t* wait_for_expert(ExpertCache& cache, const void* weights, int64_t expert) { return cache.wait(weights, expert); }

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
const uint8_t* wait_for_expert(ExpertCache&, const void*, int64_t) { return nullptr; }

}  // namespace edgespec

#endif
