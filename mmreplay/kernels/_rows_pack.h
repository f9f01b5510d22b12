/* Rows of many arrays put into records, in the caches or past them; see rows.py. */

/* Copies so many bytes from each row to each record. */
static inline void
copy_each(char *to, const char *from, size_t nbytes, size_t stride, Py_ssize_t rows)
{
    for (; rows; rows--, to += stride, from += nbytes)
        copy(to, from, nbytes);
}

/* The same for at least 16 bytes: whole words are counted once, not row by row. */
static inline void
copy_words(char *to, const char *from, size_t nbytes, size_t words, size_t stride,
           Py_ssize_t rows)
{
    for (; rows; rows--, to += stride, from += nbytes) {
        for (size_t word = 0; word < words; word++)
            memcpy(to + 16 * word, from + 16 * word, 16);
        memcpy(to + nbytes - 16, from + nbytes - 16, 16);
    }
}

static void
copy_column(char *to, const char *from, size_t nbytes, size_t stride, Py_ssize_t rows)
{
    switch (nbytes < 16 ? nbytes : nbytes / 16 * 16) {
    case 1: copy_each(to, from, 1, stride, rows); return;
    case 4: copy_each(to, from, 4, stride, rows); return;
    case 8: copy_each(to, from, 8, stride, rows); return;
    case 16: copy_words(to, from, nbytes, 1, stride, rows); return;
    case 32: copy_words(to, from, nbytes, 2, stride, rows); return;
    case 48: copy_words(to, from, nbytes, 3, stride, rows); return;
    case 64: copy_words(to, from, nbytes, 4, stride, rows); return;
    case 96: copy_words(to, from, nbytes, 6, stride, rows); return;
    case 128: copy_words(to, from, nbytes, 8, stride, rows); return;
    }
    copy_each(to, from, nbytes, stride, rows);
}

enum { BATCH = 2048 };

static void
pack_rows(RecordPacker *self, const Py_buffer *views, char *out, Py_ssize_t first,
          Py_ssize_t stop)
{
    /* A few records at a time: they are in the first cache until all is written. */
    Py_ssize_t stride = self->stride, max_rows = stride < BATCH ? BATCH / stride : 1;
    for (Py_ssize_t row = first; row < stop; row += max_rows) {
        Py_ssize_t rows = stop - row < max_rows ? stop - row : max_rows;
        for (Py_ssize_t i = 0; i < self->count; i++) {
            const Member *member = &self->members[i];
            if (member->offset >= 0)
                copy_column(out + (row - first) * stride + member->offset,
                            (const char *)views[i].buf + row * member->nbytes,
                            (size_t)member->nbytes, (size_t)stride, rows);
        }
    }
}

/* Rows with zeros where a record has no field. */
static void
pack_zeroed(RecordPacker *self, const Py_buffer *views, char *out, Py_ssize_t first,
            Py_ssize_t stop)
{
    if (self->gaps)
        memset(out, 0, (size_t)((stop - first) * self->stride));
    pack_rows(self, views, out, first, stop);
}

#ifdef __SSE2__
#include <emmintrin.h>

enum { LINE = 64 };

/* Bytes [begin, end) of a batch go past the caches, in whole lines; base and batch are
 * aligned to lines. */
static void
stream_lines(char *base, const char *batch, size_t begin, size_t end)
{
    if (begin) {
        size_t stop = end < LINE ? end : LINE;
        memcpy(base + begin, batch + begin, stop - begin);
        begin = stop;
    }
    for (; begin + LINE <= end; begin += LINE)
        for (size_t i = 0; i < LINE; i += 16)
            _mm_stream_si128((__m128i *)(base + begin + i),
                             _mm_load_si128((const __m128i *)(batch + begin + i)));
    memcpy(base + begin, batch + begin, end - begin);
}

/* The same as `pack_rows` for rows that are not read soon: a row is put together in the
 * first cache, and the bytes that it replaces are never read. */
static void
stream_rows(RecordPacker *self, const Py_buffer *views, char *out, Py_ssize_t first,
            Py_ssize_t stop)
{
    _Alignas(LINE) char batch[BATCH + LINE];
    size_t stride = (size_t)self->stride, begin = (uintptr_t)out % LINE, at = begin;
    char *base = out - begin;
    Py_ssize_t max_rows = (Py_ssize_t)(BATCH / stride);
    if (max_rows < 1) {
        pack_zeroed(self, views, out, first, stop);
        return;
    }
    for (Py_ssize_t row = first; row < stop; row += max_rows) {
        Py_ssize_t rows = stop - row < max_rows ? stop - row : max_rows;
        size_t nbytes = (size_t)rows * stride;
        if (self->gaps)
            memset(batch + at, 0, nbytes);
        pack_rows(self, views, batch + at, row, row + rows);
        at += nbytes;
        size_t full_lines = at / LINE * LINE;
        if (full_lines) {
            stream_lines(base, batch, begin, full_lines);
            base += full_lines;
            at -= full_lines;
            memcpy(batch, batch + full_lines, at);
            begin = 0;
        }
    }
    if (at > begin)
        stream_lines(base, batch, begin, at);
    /* Before any store that publishes the rows. */
    _mm_sfence();
}
#else
#define stream_rows pack_zeroed
#endif
