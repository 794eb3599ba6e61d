/* The weighted sums of fingerprints: see weighted_sums.py for what is summed. */
#include "kernel.h"

#define PAIRS 32768u /* 64-bit words of a block, each a pair of 32-bit words with a weight of its own */

static u64 even_weights[PAIRS], odd_weights[PAIRS];

static u64 splitmix(u64 seed, u64 index) {
    u64 z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (z ^ z >> 31) | 1;
}

void prepare_sums(void) {
    for (u64 pair = 0; pair < PAIRS; pair++) {
        even_weights[pair] = splitmix(2, 2 * pair);
        odd_weights[pair] = splitmix(2, 2 * pair + 1);
    }
}

static struct sums sum_one_by_one(const u8 *data, u64 words, u64 place) {
    struct sums sums = {0, 0};
    for (u64 i = 0; i < words; i++) {
        u64 word = load(data + 8 * i);
        sums.total += word;
        sums.weighted += (word & 0xFFFFFFFFu) * even_weights[place + i] + (word >> 32) * odd_weights[place + i];
    }
    return sums;
}

static struct sums add(struct sums a, struct sums b) {
    return (struct sums){a.total + b.total, a.weighted + b.weighted};
}

#define GROUP 4 /* stretches, a block apart, that are summed together: so weights are loaded and taken apart once */
#define STRIDE (8 * PAIRS)

/* The processor multiplies 32 bits by 32: weights are taken in halves, and the upper ones are moved at the end.
 * `multipliers` are those of the stretches' blocks. */
PLAIN static inline __attribute__((always_inline)) struct sums
sum_by_4(const u8 *data, u64 words, u64 place, const u64 *multipliers, const int num) {
    __m256i total = _mm256_setzero_si256(), lower[GROUP], upper[GROUP];
    for (int each = 0; each < num; each++) lower[each] = upper[each] = total;
    u64 i = 0;
    for (; i + 4 <= words; i += 4) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(even_weights + place + i)), a_upper = _mm256_srli_epi64(a, 32);
        __m256i b = _mm256_loadu_si256((const __m256i *)(odd_weights + place + i)), b_upper = _mm256_srli_epi64(b, 32);
        for (int each = 0; each < num; each++) {
            __m256i even = _mm256_loadu_si256((const __m256i *)(data + 8 * i + each * STRIDE));
            __m256i odd = _mm256_srli_epi64(even, 32);
            total = _mm256_add_epi64(total, even);
            __m256i products = _mm256_add_epi64(_mm256_mul_epu32(even, a), _mm256_mul_epu32(odd, b));
            lower[each] = _mm256_add_epi64(lower[each], products);
            products = _mm256_add_epi64(_mm256_mul_epu32(even, a_upper), _mm256_mul_epu32(odd, b_upper));
            upper[each] = _mm256_add_epi64(upper[each], products);
        }
    }
    u64 lanes[3][4];
    _mm256_storeu_si256((__m256i *)lanes[0], total);
    struct sums sums = {lanes[0][0] + lanes[0][1] + lanes[0][2] + lanes[0][3], 0};
    for (int each = 0; each < num; each++) {
        struct sums rest = sum_one_by_one(data + 8 * i + each * STRIDE, words - i, place + i);
        _mm256_storeu_si256((__m256i *)lanes[1], lower[each]);
        _mm256_storeu_si256((__m256i *)lanes[2], upper[each]);
        for (int lane = 0; lane < 4; lane++) rest.weighted += lanes[1][lane] + (lanes[2][lane] << 32);
        sums = add(sums, (struct sums){rest.total, rest.weighted * multipliers[each]});
    }
    return sums;
}

/* Not the compiler's own, which adds signed numbers and may take it that they never overflow. */
WIDE static inline __attribute__((always_inline)) u64 add_lanes(__m512i value) {
    u64 lanes[8], sum = 0;
    _mm512_storeu_si512(lanes, value);
    for (int lane = 0; lane < 8; lane++) sum += lanes[lane];
    return sum;
}

WIDE static inline __attribute__((always_inline)) struct sums
sum_by_8(const u8 *data, u64 words, u64 place, const u64 *multipliers, const int num) {
    __m512i total = _mm512_setzero_si512(), lower[GROUP], upper[GROUP];
    for (int each = 0; each < num; each++) lower[each] = upper[each] = total;
    u64 i = 0;
    for (; i + 8 <= words; i += 8) {
        __m512i a = _mm512_loadu_si512(even_weights + place + i), a_upper = _mm512_srli_epi64(a, 32);
        __m512i b = _mm512_loadu_si512(odd_weights + place + i), b_upper = _mm512_srli_epi64(b, 32);
        for (int each = 0; each < num; each++) {
            __m512i even = _mm512_loadu_si512(data + 8 * i + each * STRIDE), odd = _mm512_srli_epi64(even, 32);
            total = _mm512_add_epi64(total, even);
            __m512i products = _mm512_add_epi64(_mm512_mul_epu32(even, a), _mm512_mul_epu32(odd, b));
            lower[each] = _mm512_add_epi64(lower[each], products);
            products = _mm512_add_epi64(_mm512_mul_epu32(even, a_upper), _mm512_mul_epu32(odd, b_upper));
            upper[each] = _mm512_add_epi64(upper[each], products);
        }
    }
    struct sums sums = {add_lanes(total), 0};
    for (int each = 0; each < num; each++) {
        struct sums rest = sum_one_by_one(data + 8 * i + each * STRIDE, words - i, place + i);
        rest.weighted += add_lanes(lower[each]) + (add_lanes(upper[each]) << 32);
        sums = add(sums, (struct sums){rest.total, rest.weighted * multipliers[each]});
    }
    return sums;
}

/* The number of stretches has to be known to the compiler, which keeps their sums in registers then. */
#define CHOOSE(target, name, one)                                                                        \
    target static struct sums name(const u8 *data, u64 words, u64 place, const u64 *multipliers, int num) { \
        switch (num) {                                                                                   \
        case 1: return one(data, words, place, multipliers, 1);                                          \
        case 2: return one(data, words, place, multipliers, 2);                                          \
        case 3: return one(data, words, place, multipliers, 3);                                          \
        default: return one(data, words, place, multipliers, 4);                                         \
        }                                                                                                \
    }
CHOOSE(PLAIN, sum_stretches_plain, sum_by_4)
CHOOSE(WIDE, sum_stretches_wide, sum_by_8)

/* Sum `num` stretches of `words` words at the same place of as many blocks, the first of which is number `block`. */
static struct sums sum_stretches(const u8 *data, u64 words, u64 block, u64 place, u64 num) {
    struct sums sums = {0, 0};
    for (u64 some; num; num -= some, block += some, data += some * STRIDE) {
        u64 multipliers[GROUP];
        some = num < GROUP ? num : GROUP;
        for (u64 each = 0; each < some; each++) multipliers[each] = splitmix(3, block + each);
        sums = add(sums, is_wide ? sum_stretches_wide(data, words, place, multipliers, (int)some)
                                 : sum_stretches_plain(data, words, place, multipliers, (int)some));
    }
    return sums;
}

static struct sums sum_partial_word(const u8 *data, u64 size, u64 position) {
    u8 word[8] = {0};
    memcpy(word + position % 8, data, size);
    struct sums sums = sum_one_by_one(word, 1, position / 8 % PAIRS);
    sums.weighted *= splitmix(3, position / STRIDE);
    return sums;
}

/* Sum words `first` to `end` of a tensor, which lie at `data`: those at the same places of their blocks together. */
static struct sums sum_words(const u8 *data, u64 first, u64 end) {
    u64 low = first % PAIRS, high = end % PAIRS, places[4] = {0, low < high ? low : high, low < high ? high : low, PAIRS};
    struct sums sums = {0, 0};
    for (int i = 0; i < 3; i++) {
        u64 place = places[i], words = places[i + 1] - place;
        u64 begin = first / PAIRS + (place < low), stop = end / PAIRS + (place < high);
        if (words && begin < stop)
            sums = add(sums, sum_stretches(data + 8 * (begin * PAIRS + place - first), words, begin, place, stop - begin));
    }
    return sums;
}

static struct sums sum_run(u64 position, const u8 *data, u64 size) {
    struct sums sums = {0, 0};
    u64 head = -position % 8, tail;
    if (head > size) head = size;
    if (head) sums = sum_partial_word(data, head, position);
    position += head, data += head, size -= head, tail = size % 8;
    if (tail) sums = add(sums, sum_partial_word(data + size - tail, tail, position + size - tail));
    if (size > tail) sums = add(sums, sum_words(data, position / 8, (position + size) / 8));
    return sums;
}

void kernel_sum(u64 position, const u8 *data, u64 size, struct sums *found) {
    *found = add(*found, sum_run(position, data, size));
}

void kernel_sum_rows(const u64 *positions, u64 count, const u8 *data, u64 size, struct sums *found) {
    for (u64 row = 0; row < count; row++) *found = add(*found, sum_run(positions[row], data + row * size, size));
}
