/* What is called first. */
#include "kernel.h"

int is_wide;

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
