/* Long rows, copied out of a mapping or read from its file, and pages of a mapping made
 * ready; copies.py says what each does. Other threads run meanwhile. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { MAX_ARRAYS = 3 };

#include "_buffers.h"

typedef struct {
    const int64_t *rows;
    char *out;
    Py_ssize_t count, stride;
} Wanted;

/* Rows below a number of them, and room for all. */
static int
read_wanted(Held *held, PyObject *rows, PyObject *out, Py_ssize_t stride,
            Py_ssize_t there, Wanted *wanted)
{
    Py_ssize_t room;
    if (!(wanted->rows = hold(held, rows, 0, &wanted->count, 8)) ||
        !(wanted->out = hold(held, out, 1, &room, 1)))
        return -1;
    int fits = room / stride == wanted->count && room % stride == 0;
    for (Py_ssize_t i = 0; fits && i < wanted->count; i++)
        fits = wanted->rows[i] >= 0 && wanted->rows[i] < there;
    wanted->stride = stride;
    if (fits)
        return 0;
    refuse(held, "expected rows that there are, and room for all");
    return -1;
}

/* ---- copy_rows --------------------------------------------------------------- */

/* Asked for ahead of what is copied: processors stop at the end of a page. */
enum { AHEAD = 512, LINE = 64 };

/* Past the caches: a batch that they do not hold would be read into them first, line
 * by line, to be written. */
static void
copy_past(char *to, const char *from, size_t nbytes)
{
#ifdef __SSE2__
    size_t head = -(uintptr_t)to & 15;
    if (nbytes >= head + LINE) {
        memcpy(to, from, head);
        to += head, from += head, nbytes -= head;
        for (; nbytes >= LINE; to += LINE, from += LINE, nbytes -= LINE) {
            __builtin_prefetch(from + AHEAD);
            for (int at = 0; at < LINE; at += 16)
                _mm_stream_si128((__m128i *)(to + at),
                                 _mm_loadu_si128((const __m128i *)(from + at)));
        }
    }
#endif
    memcpy(to, from, nbytes);
}

static PyObject *
copy_rows(PyObject *module, PyObject *args)
{
    PyObject *array, *rows, *out;
    Held held = {.name = "copy_rows"};
    Py_ssize_t stride, nbytes;
    Wanted wanted;
    const char *from;
    (void)module;
    if (!PyArg_ParseTuple(args, "OnOO:copy_rows", &array, &stride, &rows, &out))
        return NULL;
    if (stride < 1)
        return refuse(&held, "expected rows of a byte at least");
    if (!(from = hold(&held, array, 0, &nbytes, 1)) ||
        read_wanted(&held, rows, out, stride, nbytes / stride, &wanted) < 0)
        return release(&held, NULL);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < wanted.count; i++)
        copy_past(wanted.out + i * stride, from + wanted.rows[i] * stride,
                  (size_t)stride);
#ifdef __SSE2__
    _mm_sfence();
#endif
    Py_END_ALLOW_THREADS
    return release(&held, Py_NewRef(Py_None));
}

/* ---- read_rows --------------------------------------------------------------- */

/* Of a longer range Linux reads what a device takes in one request, and no more. */
enum { ASKED_NBYTES = 128 << 10 };

/* Rows that follow each other in the file and in the room. */
typedef struct {
    int64_t row;
    Py_ssize_t place, count;
} Stretch;

static int
by_row(const void *one, const void *other)
{
    int64_t first = ((const Stretch *)one)->row, second = ((const Stretch *)other)->row;
    return (first > second) - (first < second);
}

static Py_ssize_t
stretches_of(const Wanted *wanted, Stretch *found)
{
    Py_ssize_t some = 0;
    for (Py_ssize_t i = 0; i < wanted->count; i++) {
        if (i > 0 && wanted->rows[i] == wanted->rows[i - 1] + 1)
            found[some - 1].count++;
        else
            found[some++] = (Stretch){wanted->rows[i], i, 1};
    }
    qsort(found, (size_t)some, sizeof *found, by_row);
    return some;
}

static int
read_stretch(int fd, char *to, size_t nbytes, int64_t offset)
{
    while (nbytes > 0) {
        ssize_t got = pread(fd, to, nbytes, (off_t)offset);
        if (got <= 0)
            return -1;
        to += got, offset += got, nbytes -= (size_t)got;
    }
    return 0;
}

typedef struct {
    int fd;
    Py_ssize_t count, stride;
    const Stretch *stretches;
} Asking;

/* Asks the disk for everything, in the order in which it is read. To ask takes a core
 * half of the time that the disk needs, and to copy most of the rest. */
static void *
ask_for_all(void *given)
{
    const Asking *asking = given;
    for (Py_ssize_t i = 0; i < asking->count; i++) {
        int64_t offset = asking->stretches[i].row * asking->stride;
        int64_t stop = offset + asking->stretches[i].count * asking->stride;
        for (; offset < stop; offset += ASKED_NBYTES) {
            int64_t nbytes = stop - offset < ASKED_NBYTES ? stop - offset : ASKED_NBYTES;
            posix_fadvise(asking->fd, (off_t)offset, (off_t)nbytes, POSIX_FADV_WILLNEED);
        }
    }
    return NULL;
}

/* Has another thread ask, or does it first where there is none to be had. */
static int
begin_asking(Asking *asking, pthread_t *thread)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int begun = pthread_create(thread, NULL, ask_for_all, asking) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!begun)
        ask_for_all(asking);
    return begun;
}

static int
read_all(int fd, const Wanted *wanted, Stretch *stretches, int ask)
{
    Py_ssize_t some = stretches_of(wanted, stretches), stride = wanted->stride;
    Asking asking = {fd, some, stride, stretches};
    pthread_t thread;
    int done = 1, begun = ask && begin_asking(&asking, &thread);
    for (Py_ssize_t i = 0; done && i < some; i++) {
        const Stretch *each = &stretches[i];
        done = read_stretch(fd, wanted->out + each->place * stride,
                            (size_t)(each->count * stride), each->row * stride) == 0;
    }
    if (begun)
        pthread_join(thread, NULL);
    return done;
}

static PyObject *
read_rows(PyObject *module, PyObject *args)
{
    PyObject *rows, *out;
    Held held = {.name = "read_rows"};
    Py_ssize_t stride;
    Wanted wanted;
    int fd, ask, done = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "inOOp:read_rows", &fd, &stride, &rows, &out, &ask))
        return NULL;
    if (stride < 1)
        return refuse(&held, "expected rows of a byte at least");
    if (read_wanted(&held, rows, out, stride, PY_SSIZE_T_MAX / stride, &wanted) < 0)
        return release(&held, NULL);
    Stretch *stretches = malloc(((size_t)wanted.count + 1) * sizeof *stretches);
    /* One of its own: what another thread closes meanwhile may be given out again, as
     * another file's. */
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (stretches != NULL && own >= 0) {
        Py_BEGIN_ALLOW_THREADS
        done = read_all(own, &wanted, stretches, ask);
        Py_END_ALLOW_THREADS
    }
    if (own >= 0)
        close(own);
    free(stretches);
    return release(&held, PyBool_FromLong(done));
}

/* ---- populate ---------------------------------------------------------------- */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static PyObject *
populate(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (given != 2)
        return PyErr_Format(PyExc_TypeError, "populate: got %zd arguments, expected 2",
                            given);
    void *address = PyLong_AsVoidPtr(args[0]);
    size_t nbytes = PyLong_AsSize_t(args[1]);
    if (PyErr_Occurred())
        return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = madvise(address, nbytes, MADV_POPULATE_WRITE) ? errno : 0;
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(failed);
}

/* ---- module ------------------------------------------------------------------ */

static PyMethodDef functions[] = {
    {"copy_rows", copy_rows, METH_VARARGS, NULL},
    {"read_rows", read_rows, METH_VARARGS, NULL},
    {"populate", (PyCFunction)(void (*)(void))populate, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "mmreplay.kernels._copies", NULL, 0, functions, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__copies(void)
{
    return PyModuleDef_Init(&module);
}
