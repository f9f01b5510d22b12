/* CRC32C; rows.py says what it does. */

static uint32_t table[8][256];

/* Bytes of each of the three spans that are folded side by side, of long data and of
 * what is left of it, and what as many zeros do to a checksum. */
#define SPAN_NBYTES 4096
#define SHORT_SPAN_NBYTES 256
static uint32_t span_zeros[4][256], short_span_zeros[4][256];

/* Computes what `count` zeros do to each byte of a checksum so far. */
static void
learn_zeros(uint32_t zeros[4][256], Py_ssize_t count)
{
    uint32_t bits[32];
    for (int bit = 0; bit < 32; bit++) {
        uint32_t crc = 1u << bit;
        for (Py_ssize_t i = 0; i < count; i++)
            crc = (crc >> 8) ^ table[0][crc & 255];
        bits[bit] = crc;
    }
    for (int k = 0; k < 4; k++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = 0;
            for (int bit = 0; bit < 8; bit++)
                if (byte >> bit & 1)
                    crc ^= bits[8 * k + bit];
            zeros[k][byte] = crc;
        }
}

static inline uint32_t
over_zeros(uint32_t zeros[4][256], uint32_t crc)
{
    return zeros[0][crc & 255] ^ zeros[1][crc >> 8 & 255] ^
           zeros[2][crc >> 16 & 255] ^ zeros[3][crc >> 24];
}

static void
fill_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0);
        table[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t byte = 0; byte < 256; byte++)
            table[k][byte] =
                (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 255];
    learn_zeros(span_zeros, SPAN_NBYTES);
    learn_zeros(short_span_zeros, SHORT_SPAN_NBYTES);
}

#if defined(__GNUC__) && defined(__x86_64__)
#define HARDWARE 1

/* Folds as many times three spans as there are, and copies them to `to` unless that is
 * NULL; returns how many bytes these were. An instruction takes three times as long as the
 * wait until the next may begin: three spans are folded side by side, and their checksums
 * combined. Stores cost nothing beside it: 256 values of 2.6 KB are summed and copied in
 * 30 us, and in 43 one after the other. */
__attribute__((target("sse4.2"), always_inline)) static inline size_t
fold_spans(uint64_t *crc, const unsigned char *data, size_t nbytes, unsigned char *to,
           size_t span, uint32_t zeros[4][256])
{
    uint64_t first = *crc, second, third, words[3];
    size_t done = 0;
    for (; nbytes - done >= 3 * span; done += 3 * span) {
        const unsigned char *from = data + done;
        second = third = 0;
        for (size_t at = 0; at < span; at += 8) {
            if (span == SPAN_NBYTES && at % 64 == 0)
                for (size_t k = 3; k < 6; k++)
                    __builtin_prefetch(from + at + k * span);
            for (size_t k = 0; k < 3; k++) {
                memcpy(&words[k], from + at + k * span, 8);
                if (to)
                    memcpy(to + done + at + k * span, &words[k], 8);
            }
            first = __builtin_ia32_crc32di(first, words[0]);
            second = __builtin_ia32_crc32di(second, words[1]);
            third = __builtin_ia32_crc32di(third, words[2]);
        }
        second ^= over_zeros(zeros, (uint32_t)first);
        first = third ^ over_zeros(zeros, (uint32_t)second);
    }
    *crc = first;
    return done;
}

__attribute__((target("sse4.2"), always_inline)) static inline uint32_t
fold_hardware(uint32_t crc, const unsigned char *data, size_t nbytes, unsigned char *to)
{
    uint64_t wide = crc, word;
    size_t done = fold_spans(&wide, data, nbytes, to, SPAN_NBYTES, span_zeros);
    done += fold_spans(&wide, data + done, nbytes - done, to ? to + done : NULL,
                       SHORT_SPAN_NBYTES, short_span_zeros);
    for (; nbytes - done >= 8; done += 8) {
        memcpy(&word, data + done, 8);
        if (to)
            memcpy(to + done, &word, 8);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    crc = (uint32_t)wide;
    for (; done < nbytes; done++) {
        if (to)
            to[done] = data[done];
        crc = __builtin_ia32_crc32qi(crc, data[done]);
    }
    return crc;
}

__attribute__((target("sse4.2"))) static uint32_t
fold_only(uint32_t crc, const unsigned char *data, size_t nbytes)
{
    return fold_hardware(crc, data, nbytes, NULL);
}

__attribute__((target("sse4.2"))) static uint32_t
fold_and_copy(uint32_t crc, const unsigned char *data, size_t nbytes, unsigned char *to)
{
    return fold_hardware(crc, data, nbytes, to);
}
#endif

/* Takes bytes into a CRC32C without its first and last inversion. */
static uint32_t
fold(uint32_t crc, const unsigned char *data, size_t nbytes)
{
#ifdef HARDWARE
    if (__builtin_cpu_supports("sse4.2"))
        return fold_only(crc, data, nbytes);
#endif
    for (; nbytes >= 8; nbytes -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= crc;
        crc = 0;
        for (int k = 0; k < 8; k++)
            crc ^= table[7 - k][(word >> (8 * k)) & 255];
    }
    for (; nbytes; nbytes--, data++)
        crc = (crc >> 8) ^ table[0][(crc ^ *data) & 255];
    return crc;
}

/* The same, and copies them. */
static uint32_t
fold_copy(uint32_t crc, const unsigned char *data, size_t nbytes, unsigned char *to)
{
#ifdef HARDWARE
    if (__builtin_cpu_supports("sse4.2"))
        return fold_and_copy(crc, data, nbytes, to);
#endif
    /* Of what was copied: another thread may change the data in between. */
    memcpy(to, data, nbytes);
    return fold(crc, to, nbytes);
}

/* Shorter data is summed faster than the interpreter lock is released and taken. */
#define LONG_SUM 4096

static PyObject *
crc32c(PyObject *module, PyObject *args)
{
    PyObject *data;
    unsigned long before = 0;
    Py_buffer view;
    (void)module;
    if (!PyArg_ParseTuple(args, "O|k:crc32c", &data, &before) ||
        contiguous(data, &view, 0) < 0)
        return NULL;
    uint32_t crc = ~(uint32_t)before;
    if (view.len < LONG_SUM)
        crc = fold(crc, view.buf, (size_t)view.len);
    else {
        Py_BEGIN_ALLOW_THREADS
        crc = fold(crc, view.buf, (size_t)view.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong((uint32_t)~crc);
}
