// Drives the cache of experts as steps do, with little room and several threads, for sanitizers to watch, and compares what
// it hands out with the file. Exit status 1 and a line for what differs.
//
// Sanitizers do not know where a place ends. A read past it is seen by what it overwrites: other experts, and what stays in
// memory between tensors.
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "expert_cache.h"
#include "packed_memory.h"

using namespace edgespec;

static std::atomic<int> failures{0};

static void expect(bool good, const char* what) {
    if (!good) printf("FAILED %s\n", what), failures++;
}

constexpr int kTensors = 3, kThreads = 4;
constexpr int64_t kExperts = 16, kPrompt = 70;  // tokens, for which the next layer is read ahead

// Layers of experts in a file and its memory. An expert's part of a tensor has as many pages as its layer says; before each
// tensor is a page of another one.
class Mixture {
   public:
    explicit Mixture(const std::vector<size_t>& pages) : last_(int(pages.size()) - 1) {
        size_t size = 0;
        for (size_t layer = 0; layer < pages.size(); layer++)
            for (int i = 0; i < kTensors; i++) {
                others_.push_back(size);
                tensors_.push_back({nullptr, pages[layer] * kPage, kExperts, int(layer)});
                size += kPage + pages[layer] * kPage * kExperts;
            }
        bytes_.resize(size);
        std::mt19937 random_bits(7);
        for (uint8_t& byte : bytes_) byte = uint8_t(random_bits());
        mend();
        begin = static_cast<uint8_t*>(reserve_pages(size, file(), false));
        for (size_t i = 0; i < tensors_.size(); i++) tensors_[i].begin = begin + others_[i] + kPage;
    }

    ~Mixture() {
        release_experts(begin);
        release_pages(begin, bytes_.size());
        fclose(file_);
    }

    int file() const { return fileno(file_); }
    size_t size() const { return bytes_.size(); }
    const std::vector<ExpertTensor>& tensors() const { return tensors_; }

    int hold(size_t most_bytes) { return hold_experts(begin, size(), file(), most_bytes, tensors_); }

    // The last layer has the last token of a prompt alone.
    void step(int64_t tokens, int64_t first, int64_t count) {
        for (int layer = 0; layer <= last_; layer++) {
            const int64_t here = layer == last_ && tokens >= kPrompt ? 1 : tokens;
            for (const ExpertTensor& tensor : tensors_)
                if (tensor.layer == layer) multiply(tensor, uses(here, first + layer, count), here);
        }
    }

    // Waits for all that is read ahead, by asking for everything.
    void settle() { step(kExperts, 0, kExperts); }

    // Nobody waits for what the first layers of a step want.
    void hurry(std::initializer_list<int64_t> tokens) {
        size_t i = 0;
        for (int64_t here : tokens) {
            const void* weights = tensors_[i].begin;
            request_experts(*expert_cache_of(weights), weights, uses(here, 0, kExperts), here);
            i += kTensors;
        }
    }

    void expect_others() const {
        for (size_t at : others_) {
            expect(memcmp(begin + at, bytes_.data() + at, kPage) == 0, "a read wrote beside its expert");
            expect(!expert_cache_of(begin + at), "what is no expert has a cache");
        }
    }

    void cut(size_t size) { expect(ftruncate(file(), off_t(readable_ = size)) == 0, "the file stays as long"); }

    void mend() {
        expect(pwrite(file(), bytes_.data(), size(), 0) == ssize_t(size()), "the file is not written");
        readable_ = size();
    }

    // Nothing can be read into memory without access.
    void protect(bool is_protected) {
        readable_ = is_protected ? 0 : size();
        mprotect(begin, size(), is_protected ? PROT_NONE : PROT_READ | PROT_WRITE);
    }

    uint8_t* begin;

   private:
    // Each token has two of `count` experts, in the order that steps ask in.
    static std::vector<ExpertUse> uses(int64_t tokens, int64_t first, int64_t count) {
        std::vector<ExpertUse> found;
        for (int64_t token = 0; token < tokens; token++)
            for (int64_t i : {0, 1}) found.push_back({(first + (token + i) % count) % kExperts, token});
        std::stable_sort(found.begin(), found.end(), [](auto& one, auto& other) { return one.expert < other.expert; });
        return found;
    }

    // One thread requests, and all take halves of experts, those that are here first.
    void multiply(const ExpertTensor& tensor, const std::vector<ExpertUse>& uses, int64_t tokens) {
        ExpertCache& cache = *expert_cache_of(tensor.begin);
        request_experts(cache, tensor.begin, uses, tokens);
        std::vector<int64_t> used;
        for (const ExpertUse& use : uses)
            if (used.empty() || used.back() != use.expert) used.push_back(use.expert);
        std::stable_partition(used.begin(), used.end(), [&](int64_t e) { return is_here(cache, tensor.begin, e); });
        std::atomic<size_t> taken{0};
        auto work = [&] {
            for (size_t i; (i = taken++) < 2 * used.size();) {
                const size_t half = tensor.slab_bytes / 2, from = i % 2 * half;
                const size_t place = size_t(tensor.begin - begin) + size_t(used[i / 2]) * tensor.slab_bytes;
                const uint8_t* found = wait_for_expert(cache, tensor.begin, used[i / 2]);
                if (place + tensor.slab_bytes > readable_) continue;
                expect(memcmp(found + from, bytes_.data() + place + from, half) == 0, "an expert's bytes are not the file's");
            }
        };
        std::vector<std::thread> threads;
        while (threads.size() < kThreads - 1) threads.emplace_back(work);
        work();
        for (std::thread& one : threads) one.join();
    }

    const int last_;
    FILE* file_ = tmpfile();
    size_t readable_ = 0;
    std::vector<uint8_t> bytes_;
    std::vector<ExpertTensor> tensors_;
    std::vector<size_t> others_;
};

// Meanwhile other threads look at the counts, and load and free another model.
static void check_steps(const std::vector<size_t>& pages, size_t room) {
    Mixture mixture(pages);
    expect(mixture.hold(room) == 0, "it is not held");
    std::atomic<bool> is_done{false};
    std::thread other([&] {
        Mixture another({1, 1});
        while (!is_done) {
            expect(another.hold(8 * kTensors * kPage) == 0, "another is not held");
            expect(expert_counts(mixture.begin).problem == 0, "there was a problem");
            another.step(3, 0, 4);
            count_experts(mixture.begin);
            release_experts(another.begin);
        }
    });
    for (int i = 0; i < 24; i++) mixture.step(i % 3 ? i % 5 + 1 : kPrompt, 5 * i, i % 2 ? 6 : 11);
    is_done = true;
    other.join();
    mixture.expect_others();
    const ExpertCounts counts = expert_counts(mixture.begin);
    const size_t all = std::accumulate(pages.begin(), pages.end(), size_t(0)) * kPage * kTensors * kExperts;
    expect((counts.read_bytes > all) == (room < all), "experts are read again where some were given up, and only there");
}

// What could not be read is told, ends no wait, and is read when it is asked for again.
static void check_problems() {
    Mixture mixture({1, 2, 1});
    auto expect_problem = [&](int problem, const char* what) {
        for (int i = 0; i < 6; i++) mixture.step(i % 2 ? kPrompt : 3, i, 6);
        mixture.settle();
        expect(expert_counts(mixture.begin).problem == problem, what);
    };
    expect(mixture.hold(20 * kTensors * kPage) == 0, "it is not held");
    expect_problem(0, "there was a problem");
    mixture.cut(mixture.size() / 2 + 100);
    expect_problem(-1, "a file that ends early is not told");
    mixture.mend();
    expect_problem(0, "the file is whole again");
    mixture.protect(true);
    expect_problem(EFAULT, "an error is not told");
    mixture.protect(false);
    expect_problem(0, "memory is there again");
    mixture.expect_others();
}

// Whose reads are under way when their places are needed for others, and when the cache is closed.
static void check_hurry() {
    for (int i = 0; i < 40; i++) {
        Mixture mixture({1, 1, 1});
        expect(mixture.hold((i % 2 ? 20 : 200) * kTensors * kPage) == 0, "it is not held");
        mixture.hurry({kPrompt, i % 3 ? kPrompt : kExperts});
        if (i % 4) mixture.settle();
    }
}

static int free_handle() {
    const int found = dup(0);
    close(found);
    return found;
}

// What cannot be held leaves nothing behind.
static void check_refusals() {
    Mixture mixture({1});
    auto hold = [&](int file, size_t offset = 0) {
        const int free = free_handle();
        const int problem = hold_experts(mixture.begin + offset, mixture.size(), file, 1 << 20, mixture.tensors());
        expect(!expert_cache_of(mixture.tensors()[0].begin), "it is held");
        expect(expert_counts(mixture.begin).read_bytes == 0, "it is counted");
        count_experts(mixture.begin);
        expect(free_handle() == free, "a handle stays open");
        return problem;
    };
    int ends[2];
    expect(pipe(ends) == 0, "no pipe");
    expect(hold(-1) == EBADF, "no file");
    expect(hold(ends[0]) == ESPIPE, "a pipe");
    expect(hold(mixture.file(), 1) == EINVAL, "no whole pages");
    for (int end : ends) close(end);
    mixture.cut(kPage + 100);
    expect(hold(mixture.file()) == -1, "a short file");
    mixture.mend();
#ifdef __GLIBC__
    pthread_attr_t usual, huge;
    pthread_getattr_default_np(&usual);
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, size_t(1) << 50);  // no addresses for one
    pthread_setattr_default_np(&huge);
    expect(hold(mixture.file()) == EAGAIN, "no threads");
    pthread_setattr_default_np(&usual);
#endif
    expect(mixture.hold(1 << 20) == 0, "it is not held");
}

int main() {
    // Fewer experts than one request has; hardly more than a layer's; of two sizes; huge pages.
    for (size_t experts : {4, 20, 40}) check_steps({1, 1, 1, 1}, experts * kTensors * kPage);
    for (size_t experts : {9, 30}) check_steps({2, 2, 1, 1}, experts * kTensors * kPage);
    check_steps({1, 2, 1}, 64 * kTensors * kPage);
    check_steps({1, 1, 1}, size_t(256) << 20);
    check_problems();
    check_hurry();
    check_refusals();
    printf("%d failures\n", failures.load());
    return failures ? 1 : 0;
}
