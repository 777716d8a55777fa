/* One pass over the memory of a tensor: its row of statistics, its sketch, its counts.
 *
 * The elements go by in blocks that stay in the first-level cache. A block is first measured as if
 * all were well: finite elements, and a mean that is small beside the spread or not much larger.
 * What came out tells whether that was so; only a block where it was not is measured again, with
 * the non-finite elements counted and put aside and the rest centred. Sums are float64 throughout.
 *
 * Never compile or link this with -ffast-math: that would switch subnormal numbers off in the
 * whole process, and with them change what a model computes. Non-finite numbers must compare here
 * as IEEE 754 says.
 */

#include <pthread.h>
#include <stdlib.h>

#include "elements.h"

/* Chunks are what threads take; they do not depend on how many threads there are, so neither does
 * any result. */
#define CHUNK (64 * BLOCK)
#define WIDTH 64
#define MOST_THREADS 64
#define STACK (1 << 20)

/* A block whose mean is beyond a hundred times its spread is centred before it is squared. */
#define LEAST_SPREAD 1e-4

/* Below this a float32 sum of a column of a block can not overflow. */
#define SAFE_FLOAT 1e36

/* What float64 elements are multiplied with when their squares overflow. */
#define SHRINK 0x1p-600

/* What is known of some elements; `sum` is of the distances from the pivot. */
typedef struct {
    double finite, nan, posinf, neginf, low, high, sum, m2;
    int overflowed;
} part;

static const part NOTHING = {0, 0, 0, 0, INFINITY, -INFINITY, 0, 0, 0};

/* Raw sums of a block as if all its elements were finite. */
typedef struct {
    double sum, square, low, high;
} sums;

static double add_up(doubles a, doubles b, doubles c, doubles d) {
    doubles all = (a + b) + (c + d);
    double total = 0;
    for (int i = 0; i < DOUBLES; i++) total += all[i];
    return total;
}

/* Where a product can be added in one instruction, some sums are products with 1: the pipes that
 * add also convert, and would be the narrowest place. It must not be known to be 1. */
#if defined(__FMA__)
static volatile double ONE = 1;
#define TIMES_ONE(x) ((x) * one)
#else
#define TIMES_ONE(x) (x)
#endif

static sums sum_single(const float *x, int count) {
    doubles s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}, q0 = {0}, q1 = {0}, q2 = {0}, q3 = {0};
    floats low0 = (floats){0} + INFINITY, low1 = low0, high0 = -low0, high1 = high0;
#if defined(__FMA__)
    doubles one = (doubles){0} + ONE;
#endif
    int i = 0;
    for (; i + 2 * FLOATS <= count; i += 2 * FLOATS) {
        floats a = LOAD(floats, x + i), b = LOAD(floats, x + i + FLOATS);
        low0 = LESSER(a, low0), high0 = GREATER(a, high0);
        low1 = LESSER(b, low1), high1 = GREATER(b, high1);
        doubles a0 = WIDEN(x + i), a1 = WIDEN(x + i + DOUBLES);
        doubles b0 = WIDEN(x + i + 2 * DOUBLES), b1 = WIDEN(x + i + 3 * DOUBLES);
        s0 += TIMES_ONE(a0), s1 += a1, s2 += TIMES_ONE(b0), s3 += b1;
        q0 += a0 * a0, q1 += a1 * a1, q2 += b0 * b0, q3 += b1 * b1;
    }
    low0 = LESSER(low0, low1), high0 = GREATER(high0, high1);
    sums all = {add_up(s0, s1, s2, s3), add_up(q0, q1, q2, q3), INFINITY, -INFINITY};
    for (int j = 0; j < FLOATS; j++) {
        if (low0[j] < all.low) all.low = low0[j];
        if (high0[j] > all.high) all.high = high0[j];
    }
    for (; i < count; i++) {
        double value = x[i];
        all.sum += value, all.square += value * value;
        if (value < all.low) all.low = value;
        if (value > all.high) all.high = value;
    }
    return all;
}

/* The same of the distances from `centre`; the extremes are of the elements themselves. */
static sums sum_wide(const double *x, int count, double centre) {
    doubles s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}, q0 = {0}, q1 = {0}, q2 = {0}, q3 = {0};
    doubles low0 = (doubles){0} + INFINITY, low1 = low0, high0 = -low0, high1 = high0;
    int i = 0;
    for (; i + 4 * DOUBLES <= count; i += 4 * DOUBLES) {
        doubles a = LOAD(doubles, x + i), b = LOAD(doubles, x + i + DOUBLES);
        doubles c = LOAD(doubles, x + i + 2 * DOUBLES), d = LOAD(doubles, x + i + 3 * DOUBLES);
        low0 = LESSER_WIDE(a, low0), high0 = GREATER_WIDE(a, high0);
        low1 = LESSER_WIDE(b, low1), high1 = GREATER_WIDE(b, high1);
        low0 = LESSER_WIDE(c, low0), high0 = GREATER_WIDE(c, high0);
        low1 = LESSER_WIDE(d, low1), high1 = GREATER_WIDE(d, high1);
        a -= centre, b -= centre, c -= centre, d -= centre;
        s0 += a, s1 += b, s2 += c, s3 += d;
        q0 += a * a, q1 += b * b, q2 += c * c, q3 += d * d;
    }
    low0 = LESSER_WIDE(low0, low1), high0 = GREATER_WIDE(high0, high1);
    sums all = {add_up(s0, s1, s2, s3), add_up(q0, q1, q2, q3), INFINITY, -INFINITY};
    for (int j = 0; j < DOUBLES; j++) {
        if (low0[j] < all.low) all.low = low0[j];
        if (high0[j] > all.high) all.high = high0[j];
    }
    for (; i < count; i++) {
        double value = x[i], apart = x[i] - centre;
        all.sum += apart, all.square += apart * apart;
        if (value < all.low) all.low = value;
        if (value > all.high) all.high = value;
    }
    return all;
}

/* Count the elements that are not finite; give the first that is, or NaN. */
static double count_others(const float *single, const double *wide, int count, part *into) {
    int nan = 0, posinf = 0, neginf = 0;
#define COUNT(x)                                                       \
    for (int i = 0; i < count; i++) {                                  \
        nan += (x)[i] != (x)[i];                                       \
        posinf += (x)[i] == INFINITY, neginf += (x)[i] == -INFINITY;   \
    }                                                                  \
    into->nan = nan, into->posinf = posinf, into->neginf = neginf;     \
    into->finite = count - nan - posinf - neginf;                      \
    if (!into->finite) return NAN;                                     \
    for (int i = 0; i < count; i++)                                    \
        if (isfinite((x)[i])) return (x)[i];
    if (single) { COUNT(single) } else { COUNT(wide) }
    return NAN;
}

/* Copy a block as float64 with another number in place of each that is not finite. */
static void fill(const float *single, const double *wide, int count, double other, double *to) {
    if (single)
        for (int i = 0; i < count; i++)
            to[i] = fabsf(single[i]) <= FLT_MAX ? (double)single[i] : other;
    else
        for (int i = 0; i < count; i++) to[i] = fabs(wide[i]) <= DBL_MAX ? wide[i] : other;
}

/* Measure a block that has non-finite elements, or whose squares would lose its spread. In place
 * of a non-finite element stands first any finite one, which leaves the extremes alone, and then
 * the centre, which adds nothing to the distances from it. */
static part measure_with_care(const float *single, const double *wide, int count, double pivot,
                              double *spare) {
    part block = NOTHING;
    double some = count_others(single, wide, count, &block);
    if (!block.finite) return block;
    fill(single, wide, count, some, spare);
    sums raw = sum_wide(spare, count, 0);
    double centre = raw.low == raw.high ? raw.low : raw.sum / count;
    if (block.finite < count) fill(single, wide, count, centre, spare);
    sums near = sum_wide(spare, count, centre);
    block.low = raw.low, block.high = raw.high;
    block.sum = block.finite * (centre - pivot) + near.sum;
    block.m2 = near.square - near.sum * (near.sum / block.finite);
    if (!(block.m2 > 0)) block.m2 = 0;
    block.overflowed = !isfinite(near.square) || !isfinite(block.sum);
    return block;
}

/* Measure a block; exactly one of `single` and `wide` is there. */
static part measure_block(const float *single, const double *wide, int count, double pivot,
                          double *spare) {
    sums raw = single ? sum_single(single, count) : sum_wide(wide, count, 0);
    double spread = raw.square - raw.sum * (raw.sum / count);
    if (!(isfinite(raw.sum) && isfinite(raw.square) && spread > LEAST_SPREAD * raw.square))
        return measure_with_care(single, wide, count, pivot, spare);
    part block = NOTHING;
    block.finite = count, block.low = raw.low, block.high = raw.high;
    block.sum = raw.sum - count * pivot, block.m2 = spread;
    return block;
}

/* Merge a part into another by Chan's formula. */
static void merge(part *into, const part *more) {
    if (into->finite && more->finite) {
        double apart = more->sum / more->finite - into->sum / into->finite;
        into->m2 += apart * apart * (into->finite / (into->finite + more->finite)) * more->finite;
    }
    into->m2 += more->m2;
    into->sum += more->sum;
    into->finite += more->finite;
    into->nan += more->nan, into->posinf += more->posinf, into->neginf += more->neginf;
    if (more->low < into->low) into->low = more->low;
    if (more->high > into->high) into->high = more->high;
    into->overflowed |= more->overflowed;
}

/* Splitmix64: 64 signs for one row of the sketch. */
static uint64_t signs_of(uint64_t row) {
    uint64_t z = row * 0x9E3779B97F4A7C15u + 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Add whole rows of 64 to the sketch; float32 sums are short enough to lose nothing that shows. */
static void sketch_rows(const float *x, int rows, uint64_t first, double *sketch) {
    floats sum[WIDTH / FLOATS];
    ints shift;
    memset(sum, 0, sizeof sum);
    for (int j = 0; j < FLOATS; j++) shift[j] = 31 - j;
    for (int i = 0; i < rows; i++, x += WIDTH) {
        uint64_t signs = signs_of(first + i);
        for (int j = 0; j < WIDTH / FLOATS; j++) {
            ints flip = ((ints){0} + (int32_t)(uint32_t)(signs >> (j * FLOATS))) << shift;
            sum[j] += (floats)(LOAD(ints, x + j * FLOATS) ^ (flip & INT32_MIN));
        }
    }
    float flat[WIDTH];
    memcpy(flat, sum, sizeof flat);
    for (int j = 0; j < WIDTH; j++) sketch[j] += flat[j];
}

static void sketch_rows_wide(const double *x, int rows, uint64_t first, double *sketch) {
    doubles sum[WIDTH / DOUBLES];
    longs shift;
    memcpy(sum, sketch, sizeof sum);
    for (int j = 0; j < DOUBLES; j++) shift[j] = 63 - j;
    for (int i = 0; i < rows; i++, x += WIDTH) {
        uint64_t signs = signs_of(first + i);
        for (int j = 0; j < WIDTH / DOUBLES; j++) {
            longs flip = ((longs){0} + (int64_t)(signs >> (j * DOUBLES))) << shift;
            sum[j] += (doubles)(LOAD(longs, x + j * DOUBLES) ^ (flip & INT64_MIN));
        }
    }
    memcpy(sketch, sum, sizeof sum);
}

static void sketch_block(const float *single, const double *wide, int count, int64_t start,
                         const part *block, double *sketch) {
    uint64_t first = (uint64_t)start / WIDTH;
    int rows = count / WIDTH, done = 0;
    if (block->finite == count) {
        if (!single) sketch_rows_wide(wide, rows, first, sketch), done = rows;
        else if (block->low > -SAFE_FLOAT && block->high < SAFE_FLOAT)
            sketch_rows(single, rows, first, sketch), done = rows;
    }
    for (; done * WIDTH < count; done++) {
        double row[WIDTH] = {0};
        for (int i = done * WIDTH; i < count && i < (done + 1) * WIDTH; i++) {
            double value = single ? (double)single[i] : wide[i];
            if (isfinite(value)) row[i % WIDTH] = value;
        }
        sketch_rows_wide(row, 1, first + done, sketch);
    }
}

/* What one call asks for, and the chunks that threads have still to take. */
typedef struct {
    const source *from, *after, *grad;
    double pivot, *sketches, *updates;
    part *parts;
    int64_t chunks, taken;
} task;

/* Give the distances of a block of two tensors, and count the elements that should have moved. */
static const double *subtract(const task *job, int64_t start, int count, scratch *room,
                              double *update) {
    const float *old, *new, *slope = NULL;
    const double *wide_old, *wide_new, *wide_slope = NULL;
    load(job->from, start, count, NULL, room->before, &old, &wide_old);
    load(job->after, start, count, NULL, room->numbers, &new, &wide_new);
    if (job->grad) load(job->grad, start, count, NULL, room->slope, &slope, &wide_slope);
    double *apart = room->raw;
    int given = 0, lost = 0;
#define SUBTRACT(old, new, slope)                                                        \
    for (int i = 0; i < count; i++) apart[i] = (double)(new)[i] - (double)(old)[i];      \
    if (slope)                                                                           \
        for (int i = 0; i < count; i++)                                                  \
            given += (slope)[i] != 0, lost += ((slope)[i] != 0) & ((new)[i] == (old)[i]); \
    else                                                                                 \
        for (int i = 0; i < count; i++) given++, lost += (new)[i] == (old)[i];
    if (old) { SUBTRACT(old, new, slope) } else { SUBTRACT(wide_old, wide_new, wide_slope) }
    update[0] += given, update[1] += lost;
    return apart;
}

/* Give a block of what a call is about, as one of `single` and `wide`. */
static void load_block(const task *job, int64_t start, int count, scratch *room, double *update,
                       const float **single, const double **wide) {
    if (!job->after) load(job->from, start, count, room->raw, room->numbers, single, wide);
    else *single = NULL, *wide = subtract(job, start, count, room, update);
}

static void measure_chunk(const task *job, int64_t chunk, scratch *room) {
    int64_t start = chunk * CHUNK, end = start + CHUNK;
    if (end > job->from->count) end = job->from->count;
    part all = NOTHING;
    for (; start < end; start += BLOCK) {
        int count = end - start < BLOCK ? (int)(end - start) : BLOCK;
        const float *single;
        const double *wide;
        load_block(job, start, count, room, job->updates + 2 * chunk, &single, &wide);
        part block = measure_block(single, wide, count, job->pivot, room->spare);
        if (job->sketches)
            sketch_block(single, wide, count, start, &block, job->sketches + chunk * WIDTH);
        merge(&all, &block);
    }
    job->parts[chunk] = all;
}

static void *take_chunks(void *argument) {
    task *job = argument;
    scratch room;
    int64_t chunk;
    while ((chunk = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED)) < job->chunks)
        measure_chunk(job, chunk, &room);
    return NULL;
}

/* Give what the first block with finite elements lies around, if that is far from 0 beside its
 * spread: distances from it keep the digits that a sum of large numbers would lose. */
static double find_pivot(const task *job) {
    double unused[2];
    scratch room;
    if (job->from->count <= BLOCK) return 0;
    for (int64_t start = 0; start < job->from->count; start += BLOCK) {
        int64_t left = job->from->count - start;
        int count = left < BLOCK ? (int)left : BLOCK;
        const float *single;
        const double *wide;
        load_block(job, start, count, &room, unused, &single, &wide);
        part block = measure_block(single, wide, count, 0, room.spare);
        if (!block.finite) continue;
        double mean = block.sum / block.finite;
        int is_far = block.m2 <= LEAST_SPREAD * mean * mean * block.finite;
        return is_far && fabs(mean) < 1e150 ? mean : 0;
    }
    return 0;
}

static part run_chunks(task *job, int threads) {
    pthread_t started[MOST_THREADS];
    int running = 0;
    job->taken = 0;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > job->chunks) threads = (int)job->chunks;
    pthread_attr_t attributes;
    if (threads > 1 && !pthread_attr_init(&attributes)) {
        pthread_attr_setstacksize(&attributes, STACK);
        while (running < threads - 1
               && !pthread_create(&started[running], &attributes, take_chunks, job))
            running++;
        pthread_attr_destroy(&attributes);
    }
    take_chunks(job);
    while (running) pthread_join(started[--running], NULL);
    part all = NOTHING;
    for (int64_t chunk = 0; chunk < job->chunks; chunk++) merge(&all, &job->parts[chunk]);
    return all;
}

static double mean_of(const part *all, double pivot) {
    if (!all->finite) return 0;
    if (all->low == all->high) return all->low;
    double mean = pivot + all->sum / all->finite;
    return mean < all->low ? all->low : mean > all->high ? all->high : mean;
}

/* Write the row, and where they are asked for the sketch and the counts of an update. */
static int measure(task *job, source *sources[3], int threads, double *row, float *sketch,
                   double *update) {
    part one = NOTHING, *parts = &one;
    double one_sketch[WIDTH] = {0}, one_update[2] = {0};
    double *sketches = sketch ? one_sketch : NULL, *updates = update ? one_update : NULL;
    int failed = 0;
    job->chunks = (job->from->count + CHUNK - 1) / CHUNK;
    if (job->chunks > 1) {
        parts = malloc((size_t)job->chunks * sizeof *parts);
        if (sketch) sketches = calloc((size_t)job->chunks * WIDTH, sizeof *sketches);
        if (update) updates = calloc((size_t)job->chunks * 2, sizeof *updates);
        failed = !parts || (sketch && !sketches) || (update && !updates);
    }
    if (!failed) {
        job->parts = parts, job->sketches = sketches, job->updates = updates;
        job->pivot = find_pivot(job);
        part all = run_chunks(job, threads);
        double mean = mean_of(&all, job->pivot), m2 = all.m2;
        for (int j = 0; sketch && j < WIDTH; j++) {
            double sum = 0;
            for (int64_t chunk = 0; chunk < job->chunks; chunk++) sum += sketches[chunk * WIDTH + j];
            sketch[j] = (float)sum;
        }
        for (int j = 0; update && j < 2; j++) {
            update[j] = 0;
            for (int64_t chunk = 0; chunk < job->chunks; chunk++) update[j] += updates[chunk * 2 + j];
        }
        if (all.overflowed || !isfinite(m2) || !isfinite(all.sum)) {
            for (int i = 0; i < 3; i++)
                if (sources[i]) sources[i]->scale = SHRINK;
            job->sketches = NULL;
            job->pivot = find_pivot(job);
            part small = run_chunks(job, threads);
            mean = mean_of(&small, job->pivot) / SHRINK, m2 = small.m2 / SHRINK / SHRINK;
        }
        double values[8] = {all.finite, all.nan, all.posinf, all.neginf,
                            all.low,    all.high, mean,      m2};
        memcpy(row, values, sizeof values);
    }
    if (job->chunks > 1) {
        free(parts);
        if (sketch) free(sketches);
        if (update) free(updates);
    }
    return failed;
}

/* From here on: what Python calls. Each gives 0, or 1 where memory could not be had. */

int hookline_measure(const void *data, int64_t count, int kind, int threads, double *row,
                     float *sketch) {
    source from = {data, count, count, count, (enum kind)kind, 1};
    source *sources[3] = {&from, NULL, NULL};
    task job = {.from = &from};
    return measure(&job, sources, threads, row, sketch, NULL);
}

/* The same of `inner` neighbours at a time, `stride` elements from one run to the next. */
int hookline_measure_runs(const void *data, int64_t count, int kind, int threads, double *row,
                          float *sketch, int64_t inner, int64_t stride) {
    source from = {data, count, inner, stride, (enum kind)kind, 1};
    source *sources[3] = {&from, NULL, NULL};
    task job = {.from = &from};
    return measure(&job, sources, threads, row, sketch, NULL);
}

/* The row of `after - before`; `update` gets how many elements had a gradient (all, where `grad`
 * is NULL) and how many of those are as they were. */
int hookline_update(const void *before, const void *after, const void *grad, int64_t count,
                    int kind, int threads, double *row, double *update) {
    source old = {before, count, count, count, (enum kind)kind, 1}, new = old, slope = old;
    new.data = after, slope.data = grad;
    source *sources[3] = {&old, &new, NULL};
    task job = {.from = &old, .after = &new, .grad = grad ? &slope : NULL};
    return measure(&job, sources, threads, row, NULL, update);
}

/* Zeros, elements below `tiny` and above `huge`, and the histogram of exponents. */
int hookline_count(const void *data, int64_t count, int kind, double tiny, double huge,
                   double *counts, int64_t *histogram) {
    source from = {data, count, count, count, (enum kind)kind, 1};
    scratch room;
    int64_t zeros = 0, below = 0, above = 0;
    /* Several histograms, so that equal exponents in a row do not wait for each other. */
    int64_t bins[4][256] = {{0}};
    for (int64_t start = 0; start < count; start += BLOCK) {
        int size = count - start < BLOCK ? (int)(count - start) : BLOCK;
        const float *single;
        const double *wide;
        int block_zeros = 0, block_below = 0, block_above = 0;
        load(&from, start, size, room.raw, room.numbers, &single, &wide);
        if (wide) {
            for (int i = 0; i < size; i++) {
                double value = fabs(wide[i]);
                block_zeros += value == 0, block_below += (value > 0) & (value < tiny);
                block_above += (value > huge) & (value < INFINITY);
            }
            for (int i = 0; i < size; i++) {
                int exponent = (int)(to_wide_bits(wide[i]) >> 52 & 2047) - 1023 + 127;
                int bin = exponent < 0 ? 0 : exponent > 254 ? 254 : exponent;
                bins[i & 3][exponent == 1024 + 127 ? 255 : bin]++;
            }
        } else {
            float least = (float)tiny, most = (float)huge;
            for (int i = 0; i < size; i++) {
                float value = fabsf(single[i]);
                block_zeros += value == 0, block_below += (value > 0) & (value < least);
                block_above += (value > most) & (value < INFINITY);
            }
            for (int i = 0; i < size; i++) bins[i & 3][to_bits(single[i]) >> 23 & 255]++;
        }
        zeros += block_zeros, below += block_below, above += block_above;
    }
    for (int bin = 0; bin < 256; bin++)
        histogram[bin] = bins[0][bin] + bins[1][bin] + bins[2][bin] + bins[3][bin];
    counts[0] = zeros, counts[1] = below, counts[2] = above;
    return 0;
}
