/* Casts, to the bits that torch gives. */
#include "kernel.h"

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

u64 kernel_cast(int cast, const u8 *in, u8 *out, u64 count) {
    if (cast == FLOAT32_TO_BFLOAT16) return is_wide ? round_wide(in, out, count) : round_plain(in, out, count);
    widen(in, out, count);
    return 0;
}
