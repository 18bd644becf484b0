// Builds the prefix tree of a batch of traces, every distinct prefix token once: kernels/spiral_kernels/prefix_tree.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace spiral {

int64_t *allocate(int64_t size);  // not initialised; std::free

struct Array {
    explicit Array(int64_t size) : size(size), data(allocate(size), std::free) {}
    int64_t size;
    std::unique_ptr<int64_t[], decltype(&std::free)> data;
    int64_t &operator[](int64_t i) { return data[i]; }
};

// The fields of spiral_kernels.PrefixTree, in its order.
struct PrefixTree {
    Array tokens, positions;                                 // (T,) by row
    Array start, end, parent, subtree_end;                   // (M,) by node
    Array edge_row, edge_target, edge_trace, edge_position;  // (R,) by edge row
    Array trace_rows;                                        // (N,) by token of the traces
};

// tokens (N,): the traces one after the other, trace i at offsets[i] .. offsets[i + 1] - 1, ids >= 0. sampled (N,):
// whether the token was sampled, never a trace's first. live: one per sampled token, or null to compute every token.
template <typename T>
PrefixTree build_prefix_tree(const T *tokens, const int64_t *offsets, int64_t n_traces, const bool *sampled,
                             const bool *live, int64_t min_shared_run);

}  // namespace spiral
