// Tiles of 64 rows of one head, products of two of them, and what a tile of queries sees of a tile of keys. Only
// tree_attention.cpp includes it, once per instruction set, which the width of a vector follows.
#pragma once

#include "tree_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace spiral::SPIRAL_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, MOST_ROWS = 12;  // floats in a vector; MOST_ROWS x 2 vectors of sums stay in registers
#elif defined(__AVX2__)
constexpr int LANES = 8, MOST_ROWS = 6;
#else
constexpr int LANES = 4, MOST_ROWS = 6;
#endif
constexpr int64_t TILE = 64, STRIP = MOST_ROWS;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef float Unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t UnalignedIntegers __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline Vector load(const float *p) { return *(const Unaligned *)p; }
inline void store(float *p, Vector x) { *(Unaligned *)p = x; }

inline float largest(Vector x) {
    float result = x[0];
    for (int i = 1; i < LANES; ++i) result = x[i] > result ? x[i] : result;
    return result;
}

inline float total(Vector x) {
    float result = 0;
    for (int i = 0; i < LANES; ++i) result += x[i];
    return result;
}

// exp(x) for x <= 0 within 2 ulp; exactly 0 below -87.
inline Vector exponential(Vector x) {
    const Integers small = x < -87.0f;
    Vector clamped = small ? Vector{} - 87.0f : x;
    Vector k = clamped * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer, kept in the low bits
    const Integers exponent = (Integers)k << 23;
    k -= 12582912.0f;
    const Vector r = clamped - k * 0.693359375f + k * 2.12194440e-4f;  // ln 2 in two parts: the first product is exact
    Vector p = Vector{} + 1.9875691500e-4f;  // Cephes' polynomial for exp on [-ln 2 / 2, ln 2 / 2]
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return small ? Vector{} : (Vector)((Integers)p + exponent);
}

// C (ROWS x VECTORS * LANES) = or += A B over K. A(m, k) = a[m * a_row + k * a_column].
template <int ROWS, int VECTORS>
inline void block(int64_t K, const float *a, int64_t a_row, int64_t a_column, const float *b, int64_t b_row, float *c,
                  int64_t c_row, bool add) {
    Vector sums[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < K; ++k) {
        Vector right[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) right[j] = load(b + k * b_row + j * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
            const Vector left = Vector{} + a[i * a_row + k * a_column];
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; ++j) sums[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) {
            float *to = c + i * c_row + j * LANES;
            store(to, add ? load(to) + sums[i][j] : sums[i][j]);
        }
}

template <int ROWS, int VECTORS, typename... Arguments> void rows_left(int rows, Arguments... arguments) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            block<ROWS, VECTORS>(arguments...);
        else
            rows_left<ROWS - 1, VECTORS>(rows, arguments...);
    }
}

template <int VECTORS>
void columns(int64_t M, int64_t K, const float *a, int64_t a_row, int64_t a_column, const float *b, int64_t b_row,
             float *c, int64_t c_row, bool add) {
    for (int64_t m = 0; m < M; m += MOST_ROWS)
        rows_left<MOST_ROWS, VECTORS>((int)std::min<int64_t>(MOST_ROWS, M - m), K, a + m * a_row, a_row, a_column, b,
                                      b_row, c + m * c_row, c_row, add);
}

// C (M x N) = or += A (M x K) B (K x N); N a multiple of LANES.
void multiply(int64_t M, int64_t N, int64_t K, const float *a, int64_t a_row, int64_t a_column, const float *b,
              int64_t b_row, float *c, int64_t c_row, bool add) {
    int64_t n = 0;
    for (; n + 2 * LANES <= N; n += 2 * LANES)
        columns<2>(M, K, a, a_row, a_column, b + n, b_row, c + n, c_row, add);
    if (n < N) columns<1>(M, K, a, a_row, a_column, b + n, b_row, c + n, c_row, add);
}

using Buffer = std::unique_ptr<float[], decltype(&std::free)>;

Buffer buffer(int64_t floats) {
    void *p = std::aligned_alloc(64, (std::max<int64_t>(floats, 1) * 4 + 63) / 64 * 64);
    if (!p) throw std::bad_alloc();
    return {(float *)p, &std::free};
}

struct Shape {  // of the work in tiles
    int64_t rows, d, padded, tiles;  // padded: D rounded up to LANES
    explicit Shape(const TreeAttention &x)
        : rows(x.rows), d(x.d), padded((x.d + LANES - 1) / LANES * LANES), tiles((x.rows + TILE - 1) / TILE) {}
    int64_t end(int64_t tile) const { return std::min(rows, (tile + 1) * TILE); }
};

// Rows first .. first + n - 1 of a head as float32 times `factor`, D padded with zeros.
void copy_rows(const Heads &x, int64_t head, int64_t first, int64_t n, const Shape &s, float factor, float *to) {
    for (int64_t r = 0; r < n; ++r, to += s.padded) {
        const int64_t at = (first + r) * x.row_stride + head * x.head_stride;
        if (x.is_bf16)
            for (int64_t i = 0; i < s.d; ++i) {
                const uint32_t bits = uint32_t(((const uint16_t *)x.data)[at + i]) << 16;
                float value;
                std::memcpy(&value, &bits, 4);
                to[i] = value * factor;
            }
        else
            for (int64_t i = 0; i < s.d; ++i) to[i] = ((const float *)x.data)[at + i] * factor;
        std::fill(to + s.d, to + s.padded, 0.0f);
    }
}

// A tile's rows (n x padded) as columns (padded x TILE), the missing ones zero.
void transpose(const float *rows, int64_t n, const Shape &s, float *to) {
    for (int64_t i = 0; i < s.padded; ++i) {
        for (int64_t r = 0; r < n; ++r) to[i * TILE + r] = rows[r * s.padded + i];
        std::fill(to + i * TILE + n, to + (i + 1) * TILE, 0.0f);
    }
}

// All heads of k or v: rows (H, tiles * TILE, padded), and if wanted columns (H, tiles, padded, TILE).
struct Keys {
    Buffer rows{nullptr, &std::free}, columns{nullptr, &std::free};
    int64_t head_size, tile_size;

    Keys(const Heads &x, const Shape &s, bool with_columns, int threads)
        : rows(buffer(x.heads * s.tiles * TILE * s.padded)), head_size(s.tiles * TILE * s.padded),
          tile_size(TILE * s.padded) {
        if (with_columns) columns = buffer(x.heads * head_size);
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
        for (int64_t h = 0; h < x.heads; ++h)
            for (int64_t tile = 0; tile < s.tiles; ++tile) {
                float *to = rows_of(h, tile);
                const int64_t n = s.end(tile) - tile * TILE;
                copy_rows(x, h, tile * TILE, n, s, 1, to);
                std::fill(to + n * s.padded, to + tile_size, 0.0f);
                if (with_columns) transpose(to, n, s, columns_of(h, tile));
            }
    }
    float *rows_of(int64_t head, int64_t tile) const { return rows.get() + head * head_size + tile * tile_size; }
    float *columns_of(int64_t head, int64_t tile) const { return columns.get() + head * head_size + tile * tile_size; }
};

// What rows first .. end - 1, some of a tile of queries, see of a tile of keys.
struct Pair {
    int64_t first, end;          // the rows that see any of its keys
    int64_t column, columns;     // keys seen by any of them, relative to the tile; both multiples of LANES
    bool full;                   // all of these rows see all of these keys
};

struct Visible {
    const int32_t *until;
    std::vector<int32_t> padded_until;       // 0 for keys past the last
    std::vector<int32_t> most, least;        // of visible_until in each tile of keys

    Visible(const TreeAttention &x, const Shape &s) : padded_until(s.tiles * TILE, 0), most(s.tiles), least(s.tiles) {
        std::copy(x.visible_until, x.visible_until + s.rows, padded_until.begin());
        until = padded_until.data();
        for (int64_t j = 0; j < s.tiles; ++j) {
            const auto range = std::minmax_element(until + j * TILE, until + s.end(j));
            least[j] = *range.first, most[j] = *range.second;
        }
    }
    bool any(int64_t queries, int64_t keys) const { return keys <= queries && most[keys] > queries * TILE; }

    // Calls `work` with the pairs of rows and keys in which anything is visible: one if all of it is, else in strips.
    template <typename Work> void pairs(int64_t queries, int64_t keys, const Shape &s, Work work) const {
        const int64_t key = keys * TILE, last = s.end(keys);
        const int64_t first = std::max(queries * TILE, key), end = std::min<int64_t>(s.end(queries), most[keys]);
        if (last <= first && last == key + TILE && least[keys] >= end) return work(Pair{first, end, 0, TILE, true});
        for (int64_t row = first; row < end; row += STRIP) {
            Pair p{row, std::min(row + STRIP, end), 0, 0, false};
            int64_t from = key, to = std::min(last, p.end);
            while (until[from] <= row) ++from;  // each of these rows sees a key of the tile
            while (until[to - 1] <= row) --to;
            p.column = (from - key) / LANES * LANES;
            p.columns = (to - key - p.column + LANES - 1) / LANES * LANES;
            work(p);
        }
    }
    // Where row sees the keys from `key` on; all ones or 0.
    Integers sees(int64_t row, int64_t key) const {
        Integers keys;
        for (int i = 0; i < LANES; ++i) keys[i] = i;
        keys += (int32_t)key;
        return (keys <= (int32_t)row) & (*(const UnalignedIntegers *)(until + key) > (int32_t)row);
    }
};

}  // namespace
}  // namespace spiral::SPIRAL_ISA
