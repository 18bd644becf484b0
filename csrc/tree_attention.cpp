// Compiled once per instruction set (SPIRAL_ISA). All arithmetic in float32; bfloat16 comes in by copy_rows. What two
// tiles need stays in the second-level cache.
#include "tree_tiles.h"

namespace spiral::SPIRAL_ISA {
namespace {

// The softmax of a tile of queries over the keys so far.
struct Softmax {
    Buffer q, sum, scores;  // (TILE, padded), (TILE, padded), (TILE, TILE)
    float origin[TILE], norm[TILE];

    explicit Softmax(const Shape &s)
        : q(buffer(TILE * s.padded)), sum(buffer(TILE * s.padded)), scores(buffer(TILE * TILE)) {}

    void start(const Shape &s) {
        std::fill(sum.get(), sum.get() + TILE * s.padded, 0.0f);
        std::fill(origin, origin + TILE, -INFINITE);
        std::fill(norm, norm + TILE, 0.0f);
    }

    // first: row of the tile's start; columns (padded, TILE) of k and rows (TILE, padded) of v of tile j.
    void add(const Pair &p, int64_t first, int64_t j, const Visible &visible, const Shape &s, const float *columns_k,
             const float *rows_v) {
        const int64_t row = p.first - first, rows = p.end - p.first, width = s.padded;
        multiply(rows, p.columns, width, q.get() + row * width, width, 1, columns_k + p.column, TILE, scores.get(),
                 TILE, false);
        for (int64_t r = 0; r < rows; ++r) {
            float *const at = scores.get() + r * TILE;
            Vector most = Vector{} - INFINITE;
            for (int64_t c = 0; c < p.columns; c += LANES) {
                Vector score = load(at + c);
                if (!p.full) {
                    const Integers seen = visible.sees(p.first + r, j * TILE + p.column + c);
                    score = seen ? score : Vector{} - INFINITE;
                    store(at + c, score);
                }
                most = score > most ? score : most;
            }
            const float origin_now = raise(row + r, largest(most), width);
            Vector part = {};
            for (int64_t c = 0; c < p.columns; c += LANES) {
                const Vector e = exponential(load(at + c) - origin_now);
                part += e;
                store(at + c, e);
            }
            norm[row + r] += total(part);
        }
        multiply(rows, width, p.columns, scores.get(), TILE, 1, rows_v + p.column * width, width,
                 sum.get() + row * width, width, true);
    }

  private:
    // The row's maximum with `here`; sums of before are measured from it. 0 while nothing is seen.
    float raise(int64_t row, float here, int64_t width) {
        if (here > origin[row]) {
            const float shrink = std::exp(origin[row] - here);
            origin[row] = here;
            norm[row] *= shrink;
            float *const to = sum.get() + row * width;
            if (shrink != 0)
                for (int64_t i = 0; i < width; i += LANES) store(to + i, load(to + i) * shrink);
        }
        return origin[row] == -INFINITE ? 0 : origin[row];
    }
};

void forward(const TreeAttention &x, float *out, float *lse) {
    const Shape s(x);
    const Visible visible(x, s);
    const Keys k(x.k, s, true, x.threads), v(x.v, s, false, x.threads);
    const int64_t group = x.q.heads / x.k.heads;
#pragma omp parallel num_threads(x.threads)
    {
        Softmax softmax(s);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t later = 0; later < s.tiles; ++later)
            for (int64_t h = 0; h < x.q.heads; ++h) {
                const int64_t t = s.tiles - 1 - later;  // the longest rows first
                const int64_t first = t * TILE, n = s.end(t) - first, kv = h / group;
                copy_rows(x.q, h, first, n, s, x.scale, softmax.q.get());
                softmax.start(s);
                for (int64_t j = 0; j <= t; ++j)
                    if (visible.any(t, j))
                        visible.pairs(t, j, s, [&](const Pair &p) {
                            softmax.add(p, first, j, visible, s, k.columns_of(kv, j), v.rows_of(kv, j));
                        });
                for (int64_t r = 0; r < n; ++r) {
                    const int64_t at = (first + r) * x.q.heads + h;
                    const float *const row = softmax.sum.get() + r * s.padded;
                    for (int64_t i = 0; i < s.d; ++i) out[at * s.d + i] = row[i] / softmax.norm[r];
                    lse[at] = softmax.origin[r] + std::log(softmax.norm[r]);
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
    void run(int64_t head, int64_t heads, float *dq, float *dk, float *dv, int64_t parts, int64_t part,
             Scratch &to) const {
        const int64_t kv = head / (x.q.heads / x.k.heads), size = s.rows * s.padded;
        for (int64_t g = 0; g < heads; ++g) prepare(head + g, to, g);
        std::fill(to.dq.get(), to.dq.get() + heads * size, 0.0f);
        for (int64_t j = 0; j < s.tiles; ++j) {
            std::fill(to.dk.get(), to.dk.get() + TILE * s.padded, 0.0f);
            std::fill(to.dv.get(), to.dv.get() + TILE * s.padded, 0.0f);
            for (int64_t g = 0; g < heads; ++g)
                for (int64_t t = j; t < s.tiles && visible.any(t, j); ++t)
                    visible.pairs(t, j, s, [&](const Pair &p) { add(p, kv, j, g, to); });
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
