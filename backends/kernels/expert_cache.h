// Experts of a mixture that is larger than memory: read from its packed file once a router has chosen them, and kept
// within a bound, those that the last tokens used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace edgespec {

// A tensor of experts in packed memory. Those of a layer are used together.
struct ExpertTensor {
    uint8_t* begin;
    size_t slab_bytes;  // of one expert: whole pages
    int64_t experts;
    int layer;
};

// An expert that a step is about to use, for a token of the step.
struct ExpertUse {
    int64_t expert, token;
};

// Since the load. Some read was under way for `busy_ns`; threads of steps waited for `waited_ns`, all together. `problem`
// is why the last read failed that did: errno, or -1 where the file ended before it.
//
// Of experts that tokens used since `count_experts`: after how many tokens of the layer they were used again, or by how
// many they had not been used when they were for the first time. Counts at i are of 2^(i/8) tokens and more.
struct ExpertCounts {
    uint64_t read_bytes, busy_ns, waited_ns;
    int problem;
    uint32_t again[128], first[128];
};

class ExpertCache;

// The cache of these weights; nullptr: all of them are in memory.
ExpertCache* expert_cache_of(const void* weights);

// From now on this packed memory, which nobody uses yet, has `most_bytes` of experts at most, which are read from the
// file, and all else, which is read now. 0, or why that cannot be, as in ExpertCounts: then it has nothing.
int hold_experts(void* begin, size_t size, int file, size_t most_bytes, const std::vector<ExpertTensor>& tensors);

// Forgets the cache of memory that nobody uses any more, if it has one.
void release_experts(const void* begin);

// What was counted; forgets the problem.
ExpertCounts expert_counts(const void* begin);

// Uses are counted from here on: those of steps that were timed say nothing about texts.
void count_experts(const void* begin);

// Has experts read that a step of so many tokens is about to use, in all tensors of the layer. Uses of an expert stand
// together, in the order of tokens. One thread of the step calls it.
void request_experts(ExpertCache& cache, const void* weights, const std::vector<ExpertUse>& uses, int64_t tokens);

// Whether an expert that was requested is here, or could not be read.
bool is_here(ExpertCache& cache, const void* weights, int64_t expert);

// Where it lies, when it is.
const uint8_t* wait_for_expert(ExpertCache& cache, const void* weights, int64_t expert);

}  // namespace edgespec
