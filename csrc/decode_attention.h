// Attention of single tokens over keys and values in slots: a run of slots that several rows have before them is read
// once for all of them.
#pragma once

#include <cstdint>

#include "row_kernels.h"

namespace spiral {

// Rows of queries, and the pool they attend to. A query head reads key head h / (query_heads / key_heads).
template <typename T> struct Queries {
    const T *query;          // (rows, query_heads, head_dim)
    const T *keys, *values;  // (slots, key_heads, head_dim)
    T *out;                  // like query
    int64_t rows, query_heads, key_heads, head_dim;
    float scale;
};

// Lists of lists: list i is values[offsets[i] .. offsets[i + 1]).
struct Lists {
    const int64_t *values, *offsets;
};

// Each row attends to the runs it is listed below and to own.slots[row * own.stride ..][.. own.length[row]], its own.
// Every (run, row) pair has a place, its index in run_rows.values; row_places lists each row's, in path order.
struct Runs {
    int64_t count;
    Lists slots, rows;  // of each run
    Lists row_places;   // of each row
};

struct Own {
    const int64_t *slots, *length;
    int64_t stride;
};

// Groups of rows that attend to prefixes of one path: row g.rows[i] sees the first visible[i] of the group's slots.
struct Paths {
    int64_t count;
    Lists slots, rows;
    const int64_t *visible;
};

struct DecodeKernels {
    // partial: (places, query_heads, head_dim + 2) float32 of scratch.
    void (*runs_f32)(Queries<float>, Runs, Own, float *partial, int threads);
    void (*runs_bf16)(Queries<bfloat16>, Runs, Own, float *partial, int threads);
    // A row's result is a function of its query and its visible keys and values alone, to the last bit.
    void (*paths_f32)(Queries<float>, Paths, int threads);
    void (*paths_bf16)(Queries<bfloat16>, Paths, int threads);
};

namespace base { extern const DecodeKernels decode_kernels; }
namespace avx2 { extern const DecodeKernels decode_kernels; }
namespace avx512 { extern const DecodeKernels decode_kernels; }

const DecodeKernels &decode_kernels();  // of instruction_set()

}  // namespace spiral
