/* The copy of one range of a tensor from file to file. */
#define _GNU_SOURCE
#include <errno.h>
#include <unistd.h>

#include "kernel.h"

enum { CRC_READ = 1, SUM_READ = 2, CRC_WRITTEN = 4, READ_AGAIN = 8, SUM_AGAIN = 16 };
enum { DONE = 0, READING = 1, WRITING = 2, AGAIN = 3 };

struct range {
    u64 what;                                  /* of the flags above */
    u64 cast;
    u64 source, source_offset;                 /* descriptors and byte offsets */
    u64 target, target_offset;
    u64 again, again_offset;                   /* where the proof finds what was written */
    u64 start, sum_start, count;               /* elements before these in the output and in what is summed; how many */
    u64 source_size, target_size;              /* bytes of an element */
    u8 *buffer, *cast_buffer;                  /* the second one, of `block` bytes, only for a cast */
    u64 buffer_size, block;                    /* `block` bytes are written at a time */
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
    if (range->what & SUM_READ) kernel_sum(range->sum_start * range->source_size + ahead, data, size, &range->sums_read);
    return 1;
}

#define PIECE 65536u /* elements that are read and cast at a time, at most: they stay in the nearer cache */

/* Fill a buffer with the next `count` elements as they are to be written; return which, or null. */
static u8 *fetch(struct range *range, u64 first, u64 count) {
    if (range->cast == KEEP) return read_source(range, range->buffer, first, count) ? range->buffer : 0;
    u64 limit = range->buffer_size / range->source_size;
    if (limit > PIECE) limit = PIECE;
    for (u64 done = 0; done < count;) {
        u64 some = count - done < limit ? count - done : limit;
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
    if (!limit || range->buffer_size < (range->cast == KEEP ? limit * size : range->source_size)) return READING;
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
