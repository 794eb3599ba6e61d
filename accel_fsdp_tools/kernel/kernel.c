/* What is done with every byte, without the interpreter: sums, casts, and the copy that an export consists of.
 *
 * For x86-64 with carry-less multiplication; the widest instructions that the processor has are chosen when the
 * library is loaded. Every function here has a twin in Python (crc.py, weighted_sums.py, export/casting.py,
 * export/copying.py) which says what it means, is used where this library is missing, and is what the tests compare
 * it with. Little-endian throughout. Nothing is allocated and nothing is kept between calls.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

#define WIDE __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.1")))
#define PLAIN __attribute__((target("avx2,pclmul,sse4.1")))

static int is_wide;

static u64 load(const u8 *data) {
    u64 word;
    memcpy(&word, data, 8);
    return word;
}

/* ---- CRC-32 (of zip files): a polynomial over GF(2), lowest bit first, so bit 31 is the coefficient of x^0. */

#define POLYNOMIAL 0xEDB88320u

static u32 crc_table[8][256];

/* To move 128 bits by D bits, their halves are multiplied by x^(D+64) and x^D. A product of two numbers that are
 * written lowest bit first comes out moved by one, hence the powers are one less. */
struct powers { u64 earlier, later; };
static struct powers by_128, by_512, by_2048;

static u32 multiply(u32 a, u32 b) {
    u32 product = 0;
    for (int place = 31; place >= 0; place--) {
        if (a >> place & 1) product ^= b;
        b = b >> 1 ^ (b & 1 ? POLYNOMIAL : 0);
    }
    return product;
}

static u32 raise_x(u64 exponent) {
    u32 power = 1u << 31, square = 1u << 30;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1) power = multiply(power, square);
        square = multiply(square, square);
    }
    return power;
}

static struct powers get_powers(unsigned bits) {
    return (struct powers){(u64)raise_x(bits + 63) << 32, (u64)raise_x(bits - 1) << 32};
}

static void prepare_crc(void) {
    for (u32 byte = 0; byte < 256; byte++) {
        u32 value = byte;
        for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? POLYNOMIAL : 0);
        crc_table[0][byte] = value;
    }
    for (int row = 1; row < 8; row++)
        for (int byte = 0; byte < 256; byte++) {
            u32 value = crc_table[row - 1][byte];
            crc_table[row][byte] = value >> 8 ^ crc_table[0][value & 255];
        }
    by_128 = get_powers(128);
    by_512 = get_powers(512);
    by_2048 = get_powers(2048);
}

/* `state` is the CRC with all bits inverted, which is what the zip format asks for at either end. */
static u32 crc_by_table(u32 state, const u8 *data, u64 size) {
    for (; size >= 8; size -= 8, data += 8) {
        u64 word = load(data) ^ state;
        state = 0;
        for (int row = 0; row < 8; row++) state ^= crc_table[7 - row][word >> (8 * row) & 255];
    }
    for (; size; size--, data++) state = state >> 8 ^ crc_table[0][(state ^ *data) & 255];
    return state;
}

PLAIN static inline __m128i fold(__m128i value, struct powers powers, __m128i next) {
    __m128i factors = _mm_set_epi64x((long long)powers.later, (long long)powers.earlier);
    __m128i earlier = _mm_clmulepi64_si128(value, factors, 0x00);
    __m128i later = _mm_clmulepi64_si128(value, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(earlier, later), next);
}

PLAIN static inline __m128i load_128(const u8 *data) { return _mm_loadu_si128((const __m128i *)data); }

PLAIN static u32 crc_by_128(u32 state, const u8 *data, u64 size) {
    if (size < 64) return crc_by_table(state, data, size);
    __m128i v[4];
    for (int i = 0; i < 4; i++) v[i] = load_128(data + 16 * i);
    v[0] = _mm_xor_si128(v[0], _mm_cvtsi32_si128((int)state));
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64)
        for (int i = 0; i < 4; i++) v[i] = fold(v[i], by_512, load_128(data + 16 * i));
    for (int i = 1; i < 4; i++) v[i] = fold(v[i - 1], by_128, v[i]);
    u8 last[16];
    _mm_storeu_si128((__m128i *)last, v[3]);
    return crc_by_table(crc_by_table(0, last, 16), data, size);
}

WIDE static u32 crc_by_512(u32 state, const u8 *data, u64 size) {
    if (size < 512) return crc_by_128(state, data, size);
    __m512i factors = _mm512_broadcast_i32x4(_mm_set_epi64x((long long)by_2048.later, (long long)by_2048.earlier));
    __m512i v[4];
    for (int i = 0; i < 4; i++) v[i] = _mm512_loadu_si512(data + 64 * i);
    v[0] = _mm512_xor_si512(v[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    for (data += 256, size -= 256; size >= 256; data += 256, size -= 256)
        for (int i = 0; i < 4; i++) {
            __m512i earlier = _mm512_clmulepi64_epi128(v[i], factors, 0x00);
            __m512i later = _mm512_clmulepi64_epi128(v[i], factors, 0x11);
            v[i] = _mm512_ternarylogic_epi64(earlier, later, _mm512_loadu_si512(data + 64 * i), 0x96);
        }
    u8 last[256];
    for (int i = 0; i < 4; i++) _mm512_storeu_si512(last + 64 * i, v[i]);
    return crc_by_128(crc_by_128(0, last, 256), data, size);
}

u32 kernel_crc32(u32 before, const u8 *data, u64 size) {
    return ~(is_wide ? crc_by_512(~before, data, size) : crc_by_128(~before, data, size));
}

/* Returns the CRC of two pieces, one after the other. */
u32 kernel_combine_crc32(u32 first, u32 second, u64 second_size) {
    return multiply(raise_x(8 * second_size), first) ^ second;
}

/* ---- Fingerprints: see weighted_sums.py for what is summed. */

#define PAIRS 32768u /* 64-bit words of a block, each a pair of 32-bit words with a weight of its own */

static u64 even_weights[PAIRS], odd_weights[PAIRS];

struct sums { u64 total, weighted; };

static u64 splitmix(u64 seed, u64 index) {
    u64 z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (z ^ z >> 31) | 1;
}

static void prepare_sums(void) {
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
    struct sums sums = {(u64)_mm512_reduce_add_epi64(total), 0};
    for (int each = 0; each < num; each++) {
        struct sums rest = sum_one_by_one(data + 8 * i + each * STRIDE, words - i, place + i);
        rest.weighted += (u64)_mm512_reduce_add_epi64(lower[each]) + ((u64)_mm512_reduce_add_epi64(upper[each]) << 32);
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
    return sum_stretches(word, 1, position / STRIDE, position / 8 % PAIRS, 1);
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

/* Adds to `found` both sums over `size` bytes that start `position` bytes into a tensor. */
void kernel_sum(u64 position, const u8 *data, u64 size, struct sums *found) {
    *found = add(*found, sum_run(position, data, size));
}

/* ---- Casts, to the bits that torch gives. */

enum { KEEP = 0, FLOAT32_TO_BFLOAT16 = 1, BFLOAT16_TO_FLOAT32 = 2 };

#define FLOAT32_INFINITY 0x7F800000u
#define BFLOAT16_LIMIT 0x7F7F8000u /* in float32: half a step above the largest bfloat16 */

static inline __attribute__((always_inline)) u64 round_values(const u8 *in, u8 *out, u64 count) {
    u64 num_overflowed = 0;
    while (count) {
        u32 found = 0;
        u64 some = count < 4096 ? count : 4096;
        for (u64 i = 0; i < some; i++) {
            u32 x;
            memcpy(&x, in + 4 * i, 4);
            u32 magnitude = x & 0x7FFFFFFFu;
            u32 rounded = (x + 0x7FFFu + (x >> 16 & 1)) >> 16;
            uint16_t y = (uint16_t)(magnitude > FLOAT32_INFINITY ? 0xFFFFu : rounded);
            found += (magnitude >= BFLOAT16_LIMIT) & (magnitude < FLOAT32_INFINITY);
            memcpy(out + 2 * i, &y, 2);
        }
        num_overflowed += found;
        count -= some, in += 4 * some, out += 2 * some;
    }
    return num_overflowed;
}

WIDE static u64 round_wide(const u8 *in, u8 *out, u64 count) { return round_values(in, out, count); }
PLAIN static u64 round_plain(const u8 *in, u8 *out, u64 count) { return round_values(in, out, count); }

static void widen(const u8 *in, u8 *out, u64 count) {
    for (u64 i = 0; i < count; i++) {
        uint16_t x;
        memcpy(&x, in + 2 * i, 2);
        u32 y = (u32)x << 16;
        memcpy(out + 4 * i, &y, 4);
    }
}

/* Returns how many finite values became infinite. */
u64 kernel_cast(int cast, const u8 *in, u8 *out, u64 count) {
    if (cast == FLOAT32_TO_BFLOAT16) return is_wide ? round_wide(in, out, count) : round_plain(in, out, count);
    widen(in, out, count);
    return 0;
}

/* ---- The copy of one range from file to file. */

enum { CRC_READ = 1, SUM_READ = 2, CRC_WRITTEN = 4, READ_AGAIN = 8, SUM_AGAIN = 16 };
enum { DONE = 0, READING = 1, WRITING = 2, AGAIN = 3 };

struct range {
    u64 what;                                  /* of the flags above */
    u64 cast;
    u64 source, source_offset;                 /* descriptors and byte offsets */
    u64 target, target_offset;
    u64 again, again_offset;                   /* where the proof finds what was written */
    u64 start, count;                          /* elements before these in the tensor, and how many */
    u64 source_size, target_size;              /* bytes of an element */
    u8 *buffer, *cast_buffer;                  /* of `block` bytes each; the second one only for a cast */
    u64 block;
    u64 crc_read, crc_written, crc_again, num_overflowed;  /* found; zero before */
    struct sums sums_read, sums_again;
};

static int read_all(int descriptor, u8 *data, u64 size, u64 offset) {
    while (size) {
        ssize_t count = pread(descriptor, data, size, (off_t)offset);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return 0;
        data += count, size -= (u64)count, offset += (u64)count;
    }
    return 1;
}

static int write_all(int descriptor, const u8 *data, u64 size, u64 offset) {
    while (size) {
        ssize_t count = pwrite(descriptor, data, size, (off_t)offset);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return 0;
        data += count, size -= (u64)count, offset += (u64)count;
    }
    return 1;
}

static int is_zero(const u8 *data, u64 size) {
    for (u64 i = 0; i < size && i < 8; i++)
        if (data[i]) return 0;
    return size <= 8 || !memcmp(data, data + 8, size - 8);
}

static int read_source(struct range *range, u8 *data, u64 first, u64 count) {
    u64 size = count * range->source_size, ahead = first * range->source_size;
    if (!read_all((int)range->source, data, size, range->source_offset + ahead)) return 0;
    if (range->what & CRC_READ) range->crc_read = kernel_crc32((u32)range->crc_read, data, size);
    if (range->what & SUM_READ) kernel_sum(range->start * range->source_size + ahead, data, size, &range->sums_read);
    return 1;
}

#define PIECE 65536u /* elements that are read and cast at a time: they stay in the nearer cache */

/* Fill a buffer with the next `count` elements as they are to be written; return which, or null. */
static u8 *fetch(struct range *range, u64 first, u64 count) {
    if (range->cast == KEEP) return read_source(range, range->buffer, first, count) ? range->buffer : 0;
    for (u64 done = 0; done < count;) {
        u64 some = count - done < PIECE ? count - done : PIECE;
        if (!read_source(range, range->buffer, first + done, some)) return 0;
        u8 *out = range->cast_buffer + done * range->target_size;
        range->num_overflowed += kernel_cast((int)range->cast, range->buffer, out, some);
        done += some;
    }
    return range->cast_buffer;
}

static int read_again(struct range *range, u8 *data, u64 first, u64 size) {
    u64 ahead = first * range->target_size;
    if (!read_all((int)range->again, data, size, range->again_offset + ahead)) return 0;
    if (range->what & SUM_AGAIN) kernel_sum(range->start * range->target_size + ahead, data, size, &range->sums_again);
    else range->crc_again = kernel_crc32((u32)range->crc_again, data, size);
    return 1;
}

/* Copies all elements; returns `DONE`, or at what it failed. The caller finds out why, by doing it all over again.
 *
 * Blocks end where the output's own blocks do: the page cache takes each as one piece then, which saves a sixth of the
 * time. What was written is read again at once, from the processor's cache. A block of zeros is not written, see
 * export/copying.py. */
int kernel_copy(struct range *range) {
    u64 size = range->target_size, limit = range->block / size;
    for (u64 done = 0; done < range->count;) {
        u64 offset = range->target_offset + done * size;
        u64 count = (range->block - offset % range->block) / size;
        if (!count || count > limit) count = limit;
        if (count > range->count - done) count = range->count - done;
        u8 *data = fetch(range, done, count);
        if (!data) return READING;
        if (range->what & CRC_WRITTEN) range->crc_written = kernel_crc32((u32)range->crc_written, data, count * size);
        if (!is_zero(data, count * size) && !write_all((int)range->target, data, count * size, offset)) return WRITING;
        if (range->what & READ_AGAIN && !read_again(range, data, done, count * size)) return AGAIN;
        done += count;
    }
    return DONE;
}

/* The CRC-32 of this file as it was compiled: who calls a library of another source would misread its memory. */
const u32 kernel_source = KERNEL_SOURCE;

/* Makes tables and chooses instructions, the narrow ones if it is told to. To be called first, and by one thread.
 * Returns the bits of the widest registers in use; 0: the processor lacks what all of this needs. */
int kernel_prepare(int is_narrow) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("pclmul")) return 0;
    is_wide = !is_narrow && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("vpclmulqdq");
    prepare_crc();
    prepare_sums();
    return is_wide ? 512 : 256;
}
