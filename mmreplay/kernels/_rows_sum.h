/* CRC32C; rows.py says what it does. */

static uint32_t table[8][256];

/* Bytes folded beside others, and what as many zeros do to a checksum. */
#define STRETCH 4096
static uint32_t stretch[4][256];

/* Learn what so many zeros do to each byte of a checksum so far. */
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
    learn_zeros(stretch, STRETCH);
}

#if defined(__GNUC__) && defined(__x86_64__)
#define HARDWARE 1

/* One instruction takes three times as long as until the next may begin: three
 * stretches are folded side by side, and put together as if they had not been. */
__attribute__((target("sse4.2"))) static uint32_t
fold_hardware(uint32_t crc, const unsigned char *data, size_t nbytes)
{
    uint64_t wide = crc, second, third, words[3];
    for (; nbytes >= 3 * STRETCH; nbytes -= 3 * STRETCH, data += 3 * STRETCH) {
        second = third = 0;
        for (size_t at = 0; at < STRETCH; at += 8) {
            if (at % 64 == 0)
                for (int k = 3; k < 6; k++)
                    __builtin_prefetch(data + at + k * STRETCH);
            memcpy(&words[0], data + at, 8);
            memcpy(&words[1], data + at + STRETCH, 8);
            memcpy(&words[2], data + at + 2 * STRETCH, 8);
            wide = __builtin_ia32_crc32di(wide, words[0]);
            second = __builtin_ia32_crc32di(second, words[1]);
            third = __builtin_ia32_crc32di(third, words[2]);
        }
        second ^= over_zeros(stretch, (uint32_t)wide);
        wide = third ^ over_zeros(stretch, (uint32_t)second);
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

/* Shorter ones are summed sooner than the interpreter is let go of. */
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
