// Compiled once per instruction set (SPIRAL_ISA). Every product of two tiles goes through `multiply`, in float32; bfloat16
// comes in by copy_rows. A tile is 64 rows of one head: queries and scores of a tile of keys stay in the second-level cache.
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
constexpr int64_t TILE = 64;
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

// What rows first .. end - 1 of a tile of queries see of a tile of keys.
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

    Pair pair(int64_t queries, int64_t keys, const Shape &s) const {
        const int64_t key = keys * TILE, last = s.end(keys);
        Pair p{std::max(queries * TILE, key), std::min<int64_t>(s.end(queries), most[keys]), 0, TILE, false};
        if (last <= p.first && last == key + TILE && least[keys] >= p.end) {
            p.full = true;
            return p;
        }
        int64_t from = key, to = std::min(last, p.end);
        while (until[from] <= p.first) ++from;
        while (until[to - 1] <= p.first) --to;
        p.column = (from - key) / LANES * LANES;
        p.columns = (to - key - p.column + LANES - 1) / LANES * LANES;
        return p;
    }
    // Where row sees the keys from `key` on; all ones or 0.
    Integers sees(int64_t row, int64_t key) const {
        Integers keys;
        for (int i = 0; i < LANES; ++i) keys[i] = i;
        keys += (int32_t)key;
        return (keys <= (int32_t)row) & (*(const UnalignedIntegers *)(until + key) > (int32_t)row);
    }
};

void forward(const TreeAttention &x, float *out, float *lse) {
    const Shape s(x);
    const Visible visible(x, s);
    const Keys k(x.k, s, true, x.threads), v(x.v, s, false, x.threads);
    const int64_t group = x.q.heads / x.k.heads;
#pragma omp parallel num_threads(x.threads)
    {
        const Buffer q = buffer(TILE * s.padded), sum = buffer(TILE * s.padded), scores = buffer(TILE * TILE);
        float origin[TILE], norm[TILE];
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t later = 0; later < s.tiles; ++later)
            for (int64_t h = 0; h < x.q.heads; ++h) {
                const int64_t t = s.tiles - 1 - later;  // the longest rows first
                const int64_t first = t * TILE, n = s.end(t) - first, kv = h / group;
                copy_rows(x.q, h, first, n, s, x.scale, q.get());
                std::fill(sum.get(), sum.get() + TILE * s.padded, 0.0f);
                std::fill(origin, origin + TILE, -INFINITE);
                std::fill(norm, norm + TILE, 0.0f);
                for (int64_t j = 0; j <= t; ++j) {
                    if (!visible.any(t, j)) continue;
                    const Pair p = visible.pair(t, j, s);
                    const int64_t row = p.first - first, rows = p.end - p.first;
                    multiply(rows, p.columns, s.padded, q.get() + row * s.padded, s.padded, 1,
                             k.columns_of(kv, j) + p.column, TILE, scores.get(), TILE, false);
                    for (int64_t r = 0; r < rows; ++r) {
                        float *const at = scores.get() + r * TILE;
                        Vector most = Vector{} - INFINITE;
                        for (int64_t c = 0; c < p.columns; c += LANES) {
                            Vector score = load(at + c);
                            if (!p.full) {
                                score = visible.sees(p.first + r, j * TILE + p.column + c) ? score : Vector{} - INFINITE;
                                store(at + c, score);
                            }
                            most = score > most ? score : most;
                        }
                        float &m = origin[row + r], &l = norm[row + r];
                        const float before = m, here = largest(most);
                        if (here > m) {
                            m = here;
                            const float shrink = std::exp(before - m);
                            l *= shrink;
                            float *const to = sum.get() + (row + r) * s.padded;
                            if (shrink != 0)
                                for (int64_t i = 0; i < s.padded; i += LANES) store(to + i, load(to + i) * shrink);
                        }
                        const float from = m == -INFINITE ? 0 : m;
                        Vector part = {};
                        for (int64_t c = 0; c < p.columns; c += LANES) {
                            const Vector e = exponential(load(at + c) - from);
                            part += e;
                            store(at + c, e);
                        }
                        l += total(part);
                    }
                    multiply(rows, s.padded, p.columns, scores.get(), TILE, 1, v.rows_of(kv, j) + p.column * s.padded,
                             s.padded, sum.get() + row * s.padded, s.padded, true);
                }
                for (int64_t r = 0; r < n; ++r) {
                    const int64_t at = (first + r) * x.q.heads + h;
                    for (int64_t i = 0; i < s.d; ++i) out[at * s.d + i] = sum[r * s.padded + i] / norm[r];
                    lse[at] = origin[r] + std::log(norm[r]);
                }
            }
    }
}

// From a row of a head in a contiguous (rows, heads, D) array.
inline float *row_of(float *x, int64_t heads, int64_t head, int64_t row, const Shape &s) {
    return x + (row * heads + head) * s.d;
}

// The gradient of some query heads of one key head: of the keys, their sum over these heads.
struct Backward {
    const TreeAttention &x;
    const Shape s;
    const Visible visible;
    const Keys k, v;
    const Heads d_out, out;
    const float *lse;

    Backward(const TreeAttention &x, Heads d_out, Heads out, const float *lse)
        : x(x), s(x), visible(x, s), k(x.k, s, true, x.threads), v(x.v, s, true, x.threads), d_out(d_out), out(out),
          lse(lse) {}

    struct Scratch {
        Buffer q, d_out, dq, delta, norm, row, probability, d_scores, dk, dv;
        Scratch(int64_t heads, const Shape &s)
            : q(buffer(heads * s.rows * s.padded)), d_out(buffer(heads * s.rows * s.padded)),
              dq(buffer(heads * s.rows * s.padded)), delta(buffer(heads * s.rows)), norm(buffer(heads * s.rows)),
              row(buffer(s.padded)), probability(buffer(TILE * TILE)), d_scores(buffer(TILE * TILE)),
              dk(buffer(TILE * s.padded)), dv(buffer(TILE * s.padded)) {}
    };

    // dq (T, Hq, D); dk and dv (T, parts, D), written at `part`.
    void run(int64_t head, int64_t heads, float *dq, float *dk, float *dv, int64_t parts, int64_t part, Scratch &to) const {
        const int64_t kv = head / (x.q.heads / x.k.heads), size = s.rows * s.padded;
        for (int64_t g = 0; g < heads; ++g) prepare(head + g, to, g);
        std::fill(to.dq.get(), to.dq.get() + heads * size, 0.0f);
        for (int64_t j = 0; j < s.tiles; ++j) {
            std::fill(to.dk.get(), to.dk.get() + TILE * s.padded, 0.0f);
            std::fill(to.dv.get(), to.dv.get() + TILE * s.padded, 0.0f);
            for (int64_t g = 0; g < heads; ++g)
                for (int64_t t = j; t < s.tiles && visible.any(t, j); ++t) add(visible.pair(t, j, s), kv, j, g, to);
            for (int64_t r = 0; r < s.end(j) - j * TILE; ++r) {
                std::copy_n(to.dk.get() + r * s.padded, s.d, row_of(dk, parts, part, j * TILE + r, s));
                std::copy_n(to.dv.get() + r * s.padded, s.d, row_of(dv, parts, part, j * TILE + r, s));
            }
        }
        for (int64_t g = 0; g < heads; ++g)
            for (int64_t r = 0; r < s.rows; ++r) {
                float *const result = row_of(dq, x.q.heads, head + g, r, s);
                for (int64_t i = 0; i < s.d; ++i) result[i] = to.dq[g * size + r * s.padded + i] * x.scale;
            }
    }

  private:
    void prepare(int64_t head, Scratch &to, int64_t g) const {
        const int64_t size = s.rows * s.padded;
        copy_rows(x.q, head, 0, s.rows, s, x.scale, to.q.get() + g * size);
        copy_rows(d_out, head, 0, s.rows, s, 1, to.d_out.get() + g * size);
        for (int64_t r = 0; r < s.rows; ++r) {
            copy_rows(out, head, r, 1, s, 1, to.row.get());
            Vector product = {};
            for (int64_t i = 0; i < s.padded; i += LANES)
                product += load(to.row.get() + i) * load(to.d_out.get() + g * size + r * s.padded + i);
            to.delta[g * s.rows + r] = total(product);
            to.norm[g * s.rows + r] = lse[r * x.q.heads + head];
        }
    }

    void add(const Pair &p, int64_t kv, int64_t j, int64_t g, Scratch &to) const {
        const int64_t rows = p.end - p.first, at = g * s.rows + p.first, width = s.padded, shift = p.column * width;
        const float *const q = to.q.get() + at * width, *const d = to.d_out.get() + at * width;
        float *const probability = to.probability.get(), *const d_scores = to.d_scores.get();
        multiply(rows, p.columns, width, q, width, 1, k.columns_of(kv, j) + p.column, TILE, probability, TILE, false);
        multiply(rows, p.columns, width, d, width, 1, v.columns_of(kv, j) + p.column, TILE, d_scores, TILE, false);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < p.columns; c += LANES) {
                float *const p_at = probability + r * TILE + c, *const d_at = d_scores + r * TILE + c;
                Vector e = exponential(load(p_at) - to.norm[at + r]);
                if (!p.full) e = visible.sees(p.first + r, j * TILE + p.column + c) ? e : Vector{};
                store(p_at, e);
                store(d_at, e * (load(d_at) - to.delta[at + r]));
            }
        multiply(rows, width, p.columns, d_scores, TILE, 1, k.rows_of(kv, j) + shift, width, to.dq.get() + at * width,
                 width, true);
        multiply(p.columns, width, rows, probability, 1, TILE, d, width, to.dv.get() + shift, width, true);
        multiply(p.columns, width, rows, d_scores, 1, TILE, q, width, to.dk.get() + shift, width, true);
    }
};

void backward(const TreeAttention &x, Heads d_out, Heads out, const float *lse, float *dq, float *dk, float *dv) {
    const Backward work(x, d_out, out, lse);
    const int64_t group = x.q.heads / x.k.heads;
    // With few key heads for the threads a task is one query head, and the parts of dk and dv are added up afterwards.
    const int64_t heads = x.k.heads % x.threads == 0 ? group : 1, tasks = x.q.heads / heads;
    const bool in_parts = heads < group;
    const int64_t part_floats = in_parts ? x.rows * tasks * x.d : 0;
    const Buffer dk_parts = buffer(part_floats), dv_parts = buffer(part_floats);
    float *const dk_to = in_parts ? dk_parts.get() : dk, *const dv_to = in_parts ? dv_parts.get() : dv;
#pragma omp parallel num_threads(x.threads)
    {
        Backward::Scratch scratch(heads, work.s);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; ++task)
            work.run(task * heads, heads, dq, dk_to, dv_to, tasks, task, scratch);
        if (in_parts) {
#pragma omp for collapse(2) schedule(static)
            for (int64_t r = 0; r < x.rows; ++r)
                for (int64_t h = 0; h < x.k.heads; ++h)
                    for (auto [parts, sum] : {std::pair(dk_to, dk), std::pair(dv_to, dv)}) {
                        float *const to = row_of(sum, x.k.heads, h, r, work.s);
                        std::fill(to, to + x.d, 0.0f);
                        for (int64_t g = 0; g < group; ++g) {
                            const float *const part = row_of(parts, tasks, h * group + g, r, work.s);
                            for (int64_t i = 0; i < x.d; ++i) to[i] += part[i];
                        }
                    }
        }
    }
}

}  // namespace

extern const TreeKernels tree_kernels = {forward, backward};

}  // namespace spiral::SPIRAL_ISA
