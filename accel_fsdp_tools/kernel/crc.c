/* CRC-32 (of zip files): a polynomial over GF(2), lowest bit first, so bit 31 is the coefficient of x^0. */
#include "kernel.h"

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

void prepare_crc(void) {
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

u32 kernel_combine_crc32(u32 first, u32 second, u64 second_size) {
    return multiply(raise_x(8 * second_size), first) ^ second;
}
