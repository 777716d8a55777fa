/* The elements of a tensor, block by block as float32 or float64, and vectors of them.
 *
 * Whatever the kind and wherever the elements lie, a block comes out as numbers side by side that
 * stay in the first-level cache.
 */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define FLOATS (BYTES / 4)
#define DOUBLES (BYTES / 8)

typedef float floats __attribute__((vector_size(BYTES)));
typedef float half_floats __attribute__((vector_size(BYTES / 2)));
typedef double doubles __attribute__((vector_size(BYTES)));
typedef int32_t ints __attribute__((vector_size(BYTES)));
typedef int64_t longs __attribute__((vector_size(BYTES)));

/* A block holds whole rows of the sketch. */
#define BLOCK 4096

enum kind { F32, F64, BF16, F16, I8, I16, I32, I64, U8, BOOL };
static const int SIZES[] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1};

/* The elements of a tensor: `outer` runs of `inner` neighbours, `stride` elements apart. */
typedef struct {
    const char *data;
    int64_t count, inner, stride;
    enum kind kind;
    double scale;
} source;

/* Room for one block: as it was gathered, as numbers, and for what is made of them. */
typedef struct {
    double raw[BLOCK], numbers[BLOCK], spare[BLOCK], before[BLOCK], slope[BLOCK];
} scratch;

#define LOAD(type, from) ({ type loaded_; memcpy(&loaded_, (from), sizeof loaded_); loaded_; })

/* WIDEN: the next few float32 as float64. LESSER, GREATER: of two, the second where the first is
 * NaN. Vector extensions say all of it in any compiler, but not in one instruction each. */
#if defined(__AVX512F__)
#define WIDEN(from) ((doubles)_mm512_cvtps_pd(_mm256_loadu_ps(from)))
#define LESSER(a, b) ((floats)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define GREATER(a, b) ((floats)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define LESSER_WIDE(a, b) ((doubles)_mm512_min_pd((__m512d)(a), (__m512d)(b)))
#define GREATER_WIDE(a, b) ((doubles)_mm512_max_pd((__m512d)(a), (__m512d)(b)))
#elif defined(__AVX2__)
#define WIDEN(from) ((doubles)_mm256_cvtps_pd(_mm_loadu_ps(from)))
#define LESSER(a, b) ((floats)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define GREATER(a, b) ((floats)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define LESSER_WIDE(a, b) ((doubles)_mm256_min_pd((__m256d)(a), (__m256d)(b)))
#define GREATER_WIDE(a, b) ((doubles)_mm256_max_pd((__m256d)(a), (__m256d)(b)))
#else
#define WIDEN(from) __builtin_convertvector(LOAD(half_floats, from), doubles)
#define PICK(mask, a, b, type, whole) ((type)(((whole)(a) & (mask)) | ((whole)(b) & ~(mask))))
#define LESSER(a, b) PICK((a) < (b), a, b, floats, ints)
#define GREATER(a, b) PICK((a) > (b), a, b, floats, ints)
#define LESSER_WIDE(a, b) PICK((a) < (b), a, b, doubles, longs)
#define GREATER_WIDE(a, b) PICK((a) > (b), a, b, doubles, longs)
#endif

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static uint64_t to_wide_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float from_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x0400) return from_bits(sign | ((rest << 13) + 0x38000000));
    float value = (float)rest * 0x1p-24f;
    return sign ? -value : value;
}

static void widen_float16(const uint16_t *from, float *to, int count) {
    int i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + i))));
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < count; i++) to[i] = from_float16(from[i]);
}

/* Give where elements `start` to `start + count` lie side by side. */
static const void *gather(const source *from, int64_t start, int count, void *raw) {
    int size = SIZES[from->kind];
    if (from->inner == from->stride) return from->data + start * size;
    int64_t run = start / from->inner, within = start % from->inner;
    for (int filled = 0; filled < count; run++, within = 0) {
        int64_t left = from->inner - within;
        int taken = left < count - filled ? (int)left : count - filled;
        memcpy((char *)raw + (size_t)filled * size,
               from->data + (run * from->stride + within) * size, (size_t)taken * size);
        filled += taken;
    }
    return raw;
}

/* Give a block as float32, or as float64 where float32 does not hold the kind exactly: one of
 * the two. What needs converting is written to `numbers`. */
static void load(const source *from, int64_t start, int count, void *raw, void *numbers,
                 const float **single, const double **wide) {
    const void *data = gather(from, start, count, raw);
    float *to_single = numbers;
    double *to_wide = numbers;
    *single = NULL, *wide = NULL;
#define CONVERT(type, to, expression)                       \
    do {                                                    \
        const type *x = data;                               \
        for (int i = 0; i < count; i++) to[i] = expression; \
    } while (0)
    switch (from->kind) {
    case F32: *single = data; return;
    case BF16: CONVERT(uint16_t, to_single, from_bits((uint32_t)x[i] << 16)); break;
    case F16: widen_float16(data, to_single, count); break;
    case I8: CONVERT(int8_t, to_single, (float)x[i]); break;
    case I16: CONVERT(int16_t, to_single, (float)x[i]); break;
    case U8: CONVERT(uint8_t, to_single, (float)x[i]); break;
    case BOOL: CONVERT(uint8_t, to_single, (float)(x[i] != 0)); break;
    case I32: CONVERT(int32_t, to_wide, (double)x[i]); *wide = to_wide; return;
    case I64: CONVERT(int64_t, to_wide, (double)x[i]); *wide = to_wide; return;
    case F64:
        *wide = from->scale == 1 ? data : to_wide;
        if (from->scale != 1) CONVERT(double, to_wide, x[i] * from->scale);
        return;
    }
    *single = to_single;
}
