/* What is done with every byte, without the interpreter: sums, casts, and the copy that an export consists of.
 *
 * For x86-64 with carry-less multiplication and AVX2; where the processor has wider registers, `is_wide` is set when
 * the library is prepared. Every function has a twin in Python (crc.py, weighted_sums.py, export/casting.py,
 * export/copier.py) which says what it means, is used where this library is missing, and is what the tests compare it
 * with. Little-endian throughout. Nothing is allocated, and nothing is kept between calls but tables.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

#define WIDE __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.1")))
#define PLAIN __attribute__((target("avx2,pclmul,sse4.1")))
#define HIDDEN __attribute__((visibility("hidden")))

struct sums { u64 total, weighted; };

extern HIDDEN int is_wide;

HIDDEN void prepare_crc(void);
HIDDEN void prepare_sums(void);

/* Return the CRC-32 of bytes that follow on others whose CRC-32 is `before`. */
u32 kernel_crc32(u32 before, const u8 *data, u64 size);

/* Return the CRC-32 of two pieces, one after the other. */
u32 kernel_combine_crc32(u32 first, u32 second, u64 second_size);

/* Add to `found` both sums over `size` bytes that start `position` bytes into a tensor. */
void kernel_sum(u64 position, const u8 *data, u64 size, struct sums *found);

/* The same over rows of `size` bytes that lie one after another; `positions` says where in the tensor each starts. */
void kernel_sum_rows(const u64 *positions, u64 count, const u8 *data, u64 size, struct sums *found);

/* Cast `count` elements; return how many finite values became infinite. */
u64 kernel_cast(int cast, const u8 *in, u8 *out, u64 count);

enum { KEEP = 0, FLOAT32_TO_BFLOAT16 = 1, BFLOAT16_TO_FLOAT32 = 2 };

static inline u64 load(const u8 *data) {
    u64 word;
    memcpy(&word, data, 8);
    return word;
}
