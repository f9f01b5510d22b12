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

/* An instruction takes three times as long as the wait until the next may begin: three
 * spans are folded side by side, and their checksums combined. */
__attribute__((target("sse4.2"))) static uint32_t
fold_hardware(uint32_t crc, const unsigned char *data, size_t nbytes)
{
    uint64_t wide = crc, second, third, words[3];
    for (; nbytes >= 3 * SPAN_NBYTES; nbytes -= 3 * SPAN_NBYTES, data += 3 * SPAN_NBYTES) {
        second = third = 0;
        for (size_t at = 0; at < SPAN_NBYTES; at += 8) {
            if (at % 64 == 0)
                for (int k = 3; k < 6; k++)
                    __builtin_prefetch(data + at + k * SPAN_NBYTES);
            memcpy(&words[0], data + at, 8);
            memcpy(&words[1], data + at + SPAN_NBYTES, 8);
            memcpy(&words[2], data + at + 2 * SPAN_NBYTES, 8);
            wide = __builtin_ia32_crc32di(wide, words[0]);
            second = __builtin_ia32_crc32di(second, words[1]);
            third = __builtin_ia32_crc32di(third, words[2]);
        }
        second ^= over_zeros(span_zeros, (uint32_t)wide);
        wide = third ^ over_zeros(span_zeros, (uint32_t)second);
    }
    for (; nbytes >= 3 * SHORT_SPAN_NBYTES;
         nbytes -= 3 * SHORT_SPAN_NBYTES, data += 3 * SHORT_SPAN_NBYTES) {
        second = third = 0;
        for (size_t at = 0; at < SHORT_SPAN_NBYTES; at += 8) {
            memcpy(&words[0], data + at, 8);
            memcpy(&words[1], data + at + SHORT_SPAN_NBYTES, 8);
            memcpy(&words[2], data + at + 2 * SHORT_SPAN_NBYTES, 8);
            wide = __builtin_ia32_crc32di(wide, words[0]);
            second = __builtin_ia32_crc32di(second, words[1]);
            third = __builtin_ia32_crc32di(third, words[2]);
        }
        second ^= over_zeros(short_span_zeros, (uint32_t)wide);
        wide = third ^ over_zeros(short_span_zeros, (uint32_t)second);
    }
    for (; nbytes >= 8; nbytes -= 8, data += 8) {
        memcpy(&words[0], data, 8);
        wide = __builtin_ia32_crc32di(wide, words[0]);
    }
    crc = (uint32_t)wide;
    for (; nbytes; nbytes--, data++)
        crc = __builtin_ia32_crc32qi(crc, *data);
    return crc;
}
#endif

/* Takes bytes into a CRC32C without its first and last inversion. */
static uint32_t
fold(uint32_t crc, const unsigned char *data, size_t nbytes)
{
#ifdef HARDWARE
    if (__builtin_cpu_supports("sse4.2"))
        return fold_hardware(crc, data, nbytes);
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
