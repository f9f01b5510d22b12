/* Checksums by carry-less multiplication: "Fast CRC Computation for Generic
 * Polynomials Using PCLMULQDQ Instruction" (Gopal et al., Intel, 2009), 64 bytes at a
 * time. sums.py is the twin, and serves where the processor has no such instruction. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

enum { FOLD = 64, HALF = 16 };

/* A polynomial, its bits reversed, and what its powers leave: x^(n+32) and x^(n-32) of
 * n = 512 bits, by which 64 bytes are folded, and of 128. */
typedef struct {
    uint32_t polynomial, table[256];
    int64_t far[2], near[2];
} Sum;

static Sum zip = {
    .polynomial = 0xEDB88320u,
    .far = {0x154442BD4, 0x1C6E41596},
    .near = {0x1751997D0, 0x0CCAA009E},
};
static Sum castagnoli = {
    .polynomial = 0x82F63B78u,
    .far = {0x740EEF02, 0x9E4ADDF8},
    .near = {0xF20C0DFE, 0x14CD00BD6},
};

static void
fill(Sum *sum)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t rest = byte;
        for (int bit = 0; bit < 8; bit++)
            rest = rest & 1 ? rest >> 1 ^ sum->polynomial : rest >> 1;
        sum->table[byte] = rest;
    }
}

/* One byte at a time. */
static uint32_t
plain(const Sum *sum, uint32_t crc, const unsigned char *data, size_t nbytes)
{
    for (size_t i = 0; i < nbytes; i++)
        crc = crc >> 8 ^ sum->table[(crc ^ data[i]) & 0xFF];
    return crc;
}

/* What 16 bytes leave that stand so many bits before others. */
__attribute__((target("pclmul,sse2"))) static inline __m128i
fold(__m128i value, __m128i by, __m128i onto)
{
    __m128i low = _mm_clmulepi64_si128(value, by, 0x00);
    __m128i high = _mm_clmulepi64_si128(value, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

__attribute__((target("pclmul,sse2"))) static uint32_t
folded(const Sum *sum, uint32_t crc, const unsigned char *data, size_t nbytes)
{
    if (nbytes < 2 * FOLD)
        return plain(sum, crc, data, nbytes);
    __m128i lanes[4], by = _mm_loadu_si128((const __m128i *)sum->far);
    for (int i = 0; i < 4; i++)
        lanes[i] = _mm_loadu_si128((const __m128i *)data + i);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)crc));
    for (data += FOLD, nbytes -= FOLD; nbytes >= FOLD; data += FOLD, nbytes -= FOLD)
        for (int i = 0; i < 4; i++)
            lanes[i] =
                fold(lanes[i], by, _mm_loadu_si128((const __m128i *)data + i));
    by = _mm_loadu_si128((const __m128i *)sum->near);
    __m128i all = lanes[0];
    for (int i = 1; i < 4; i++)
        all = fold(all, by, lanes[i]);
    for (; nbytes >= HALF; data += HALF, nbytes -= HALF)
        all = fold(all, by, _mm_loadu_si128((const __m128i *)data));
    unsigned char left[HALF];
    _mm_storeu_si128((__m128i *)left, all);
    return plain(sum, plain(sum, 0, left, HALF), data, nbytes);
}

static PyObject *
sum_of(const Sum *sum, PyObject *args)
{
    Py_buffer view;
    unsigned int before = 0;
    if (!PyArg_ParseTuple(args, "y*|I", &view, &before))
        return NULL;
    uint32_t crc;
    Py_BEGIN_ALLOW_THREADS
    crc = ~folded(sum, ~(uint32_t)before, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *
crc32(PyObject *module, PyObject *args)
{
    (void)module;
    return sum_of(&zip, args);
}

static PyObject *
crc32c(PyObject *module, PyObject *args)
{
    (void)module;
    return sum_of(&castagnoli, args);
}

static int
able(void)
{
    fill(&zip);
    fill(&castagnoli);
    return __builtin_cpu_supports("pclmul");
}

static PyMethodDef functions[] = {
    {"crc32", crc32, METH_VARARGS, NULL},
    {"crc32c", crc32c, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
#else
static int
able(void)
{
    return 0;
}

static PyMethodDef functions[] = {{NULL, NULL, 0, NULL}};
#endif

/* Lets the twin's functions stand here. */
static int
borrow(PyObject *module)
{
    const char *names[] = {"crc32", "crc32c"};
    PyObject *twin = PyImport_ImportModule("mmreplay.kernels.sums");
    int told = twin == NULL ? -1 : 0;
    for (int i = 0; i < 2 && !told; i++) {
        PyObject *function = PyObject_GetAttrString(twin, names[i]);
        told = function ? PyModule_AddObjectRef(module, names[i], function) : -1;
        Py_XDECREF(function);
    }
    Py_XDECREF(twin);
    return told;
}

static int
execute(PyObject *module)
{
    return able() ? 0 : borrow(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "mmreplay.kernels._sums", NULL, 0, functions, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__sums(void)
{
    return PyModuleDef_Init(&module);
}
