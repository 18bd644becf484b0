// Causal attention over a prefix tree, forward and backward, in strips of queries and chunks of keys that stay in cache.
#pragma once

#include <cstdint>

namespace spiral {

// (rows, heads, D) in memory, stride 1 in D; the other strides in elements.
struct Heads {
    const void *data;  // float32, or bfloat16 bits
    int64_t heads, row_stride, head_stride;
    bool is_bf16;
};

// (rows, heads, D), contiguous.
struct Result {
    void *data;  // float32, or bfloat16 bits
    int64_t heads;
    bool is_bf16;
};

// T rows, depth-first. Query row q sees key row k if and only if k <= q < visible_until[k].
struct TreeAttention {
    Heads q, k, v;
    int64_t rows, d;
    const int32_t *visible_until;
    float scale;
    int threads;
};

struct TreeKernels {
    // out (T, Hq, D), lse (T, Hq)
    void (*forward)(const TreeAttention &, Result out, float *lse);
    // dq (T, Hq, D), dk and dv (T, Hkv, D)
    void (*backward)(const TreeAttention &, Heads d_out, Heads out, const float *lse, Result dq, Result dk, Result dv);
};

namespace base { extern const TreeKernels tree_kernels; }
namespace avx2 { extern const TreeKernels tree_kernels; }
namespace avx512 { extern const TreeKernels tree_kernels; }

const TreeKernels &tree_kernels();  // of instruction_set()

}  // namespace spiral
