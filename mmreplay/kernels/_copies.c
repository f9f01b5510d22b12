/* Long rows, copied out of a mapping or read from its file, and pages of a mapping made
 * ready; copies.py says what each does. Other threads run during a copy. */

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

enum { MAX_ARRAYS = 7 };

#include "_buffers.h"

typedef struct {
    const int64_t *rows;
    char *out;
    Py_ssize_t count, stride;
} Wanted;

/* Reads rows in [0, num_rows) and an output as long as they are. */
static int
read_wanted(Buffers *buffers, PyObject *rows, PyObject *out, Py_ssize_t stride,
            Py_ssize_t num_rows, Wanted *wanted)
{
    Py_ssize_t out_nbytes;
    if (!(wanted->rows = acquire(buffers, rows, 0, &wanted->count, 8)) ||
        !(wanted->out = acquire(buffers, out, 1, &out_nbytes, 1)))
        return -1;
    int fits = out_nbytes / stride == wanted->count && out_nbytes % stride == 0;
    for (Py_ssize_t i = 0; fits && i < wanted->count; i++)
        fits = wanted->rows[i] >= 0 && wanted->rows[i] < num_rows;
    wanted->stride = stride;
    if (fits)
        return 0;
    refuse(buffers, "rows must exist, and out must hold all of them");
    return -1;
}

/* ---- copy_rows --------------------------------------------------------------- */

/* Prefetched ahead of the copy: processors themselves stop at the end of a page. */
enum { AHEAD = 512, LINE = 64 };

/* Writes past the caches: otherwise each line of a batch that they do not hold would be
 * read into them before it is written. */
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
    Buffers buffers = {.name = "copy_rows"};
    Py_ssize_t stride, nbytes;
    Wanted wanted;
    const char *from;
    (void)module;
    if (!PyArg_ParseTuple(args, "OnOO:copy_rows", &array, &stride, &rows, &out))
        return NULL;
    if (stride < 1)
        return refuse(&buffers, "rows must have at least one byte");
    if (!(from = acquire(&buffers, array, 0, &nbytes, 1)) ||
        read_wanted(&buffers, rows, out, stride, nbytes / stride, &wanted) < 0)
        return release(&buffers, NULL);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < wanted.count; i++)
        copy_past(wanted.out + i * stride, from + wanted.rows[i] * stride,
                  (size_t)stride);
#ifdef __SSE2__
    _mm_sfence();
#endif
    Py_END_ALLOW_THREADS
    return release(&buffers, Py_NewRef(Py_None));
}

/* ---- copy_spans -------------------------------------------------------------- */

/* How many spans ahead of the copied one a span is requested, and how much of it: 256 spans
 * of 2.6 KB take 58 us, and 76 with 1 and 1024. What is in the caches already takes longer,
 * by less than 2 us for 256 spans. */
enum { SPANS_AHEAD = 4, REQUESTED_NBYTES = 8192 };

/* The processor foresees a span's lines from its first ones on; it does not foresee where
 * the next span begins. Requested into the second cache, as records are in _steps_take.h. */
static inline void
request_span(const char *span, int64_t nbytes)
{
    for (int at = 0; at < REQUESTED_NBYTES && at < nbytes; at += LINE)
        __builtin_prefetch(span + at, 0, 2);
}

/* Whether spans of some bytes lie inside of as many as there are. */
static int
inside(const int64_t *begins, const int64_t *nbytes, Py_ssize_t count, Py_ssize_t there)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (nbytes[i] < 0 || begins[i] < 0 || begins[i] > there ||
            nbytes[i] > there - begins[i])
            return 0;
    return 1;
}

/* Whether as many bytes are there as some spans have together. */
static int
together(const int64_t *nbytes, Py_ssize_t count, Py_ssize_t there)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (nbytes[i] > there)
            return 0;
        there -= nbytes[i];
    }
    return 1;
}

static PyObject *
copy_spans(PyObject *module, PyObject *args)
{
    PyObject *source, *begins, *nbytes, *out, *targets;
    Buffers buffers = {.name = "copy_spans"};
    Py_ssize_t source_nbytes, count, counts[2], out_nbytes;
    const char *from;
    const int64_t *begin, *size, *target;
    char *to;
    int waits;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOp:copy_spans", &source, &begins, &nbytes, &out,
                          &targets, &waits))
        return NULL;
    if (!(from = acquire(&buffers, source, 0, &source_nbytes, 1)) ||
        !(begin = acquire(&buffers, begins, 0, &count, 8)) ||
        !(size = acquire(&buffers, nbytes, 0, &counts[0], 8)) ||
        !(to = acquire(&buffers, out, 1, &out_nbytes, 1)))
        return release(&buffers, NULL);
    target = NULL, counts[1] = count;
    if (targets != Py_None && !(target = acquire(&buffers, targets, 0, &counts[1], 8)))
        return release(&buffers, NULL);
    if (counts[0] != count || counts[1] != count ||
        !inside(begin, size, count, source_nbytes) ||
        !(target ? inside(target, size, count, out_nbytes)
                 : together(size, count, out_nbytes)))
        return refuse(&buffers, "spans must lie inside of source and out");
    Py_ssize_t done = 0;
    PyThreadState *state = waits ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t i = 0; i < count && i < SPANS_AHEAD; i++)
        request_span(from + begin[i], size[i]);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + SPANS_AHEAD < count)
            request_span(from + begin[i + SPANS_AHEAD], size[i + SPANS_AHEAD]);
        memcpy(to + (target ? target[i] : done), from + begin[i], (size_t)size[i]);
        done += size[i];
    }
    if (state)
        PyEval_RestoreThread(state);
    return release(&buffers, Py_NewRef(Py_None));
}

/* ---- find_values ------------------------------------------------------------- */

/* What a row holds of a value that varies, as it stands in the record. */
typedef struct {
    int64_t position;
    uint32_t length, crc;
} Reference;

enum { HEAP_ALIGNMENT = 8 };

typedef struct {
    int64_t nbytes, longest, item;
    Py_ssize_t num_envs;
    const int64_t *tails, *heads;
} Heap;

/* Whether a reference names bytes that the heap's bounds let be read; see format/heap.py.
 * `within` is its position in the ring. */
static int
is_legal(const Reference *reference, const Heap *heap, int64_t env_id, int64_t nbytes,
         int64_t within)
{
    int64_t position = reference->position;
    if (reference->length < 1)
        return position == 0 && reference->crc == 0;
    return reference->length <= heap->longest && position >= heap->tails[env_id] &&
           position >= 0 && position % HEAP_ALIGNMENT == 0 && nbytes <= heap->nbytes &&
           position <= heap->heads[env_id] - nbytes &&
           within <= heap->nbytes - nbytes;
}

static PyObject *
find_values(PyObject *module, PyObject *args)
{
    PyObject *references, *envs, *tails, *heads, *begins, *sizes, *offsets;
    Buffers buffers = {.name = "find_values"};
    Py_ssize_t counts[5], num_heads;
    Heap heap;
    const int64_t *env;
    int64_t *begin, *size, *offset;
    long illegal = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOLLLOOO:find_values", &references, &envs, &tails,
                          &heads, &heap.nbytes, &heap.longest, &heap.item, &begins, &sizes,
                          &offsets))
        return NULL;
    Py_buffer *view = &buffers.views[0];
    if (PyObject_GetBuffer(references, view, PyBUF_STRIDED_RO) < 0)
        return NULL;
    buffers.count++;
    if (!(env = acquire(&buffers, envs, 0, &counts[0], 8)) ||
        !(heap.tails = acquire(&buffers, tails, 0, &heap.num_envs, 8)) ||
        !(heap.heads = acquire(&buffers, heads, 0, &num_heads, 8)) ||
        !(begin = acquire(&buffers, begins, 1, &counts[1], 8)) ||
        !(size = acquire(&buffers, sizes, 1, &counts[2], 8)) ||
        !(offset = acquire(&buffers, offsets, 1, &counts[3], 8)))
        return release(&buffers, NULL);
    if (view->ndim != 1 || view->itemsize != (Py_ssize_t)sizeof(Reference) ||
        heap.nbytes < 1 || heap.item < 0 || heap.longest < 1 || heap.longest > UINT32_MAX ||
        heap.item > (INT64_MAX >> 1) / heap.longest || num_heads != heap.num_envs)
        return refuse(&buffers, "references must be of a heap");
    Py_ssize_t count = view->shape[0];
    if (counts[0] != count || counts[1] != count || counts[2] != count ||
        counts[3] != count + 1)
        return refuse(&buffers, "arrays must have as many numbers as there are references");
    for (Py_ssize_t i = 0; i < count; i++)
        if (env[i] < 0 || env[i] >= heap.num_envs)
            return refuse(&buffers, "environments must exist");
    offset[0] = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Reference reference;
        memcpy(&reference, (const char *)view->buf + i * view->strides[0],
               sizeof reference);
        int fits = reference.length <= heap.longest;
        int64_t nbytes = fits ? reference.length * heap.item : 0;
        /* A division takes longer than all the rest. */
        int64_t within = reference.position % heap.nbytes;
        if (!fits || !is_legal(&reference, &heap, env[i], nbytes, within)) {
            reference.length = 0;
            nbytes = within = 0;
            illegal++;
        }
        begin[i] = env[i] * heap.nbytes + within;
        size[i] = nbytes;
        offset[i + 1] = offset[i] + reference.length;
    }
    return release(&buffers, PyLong_FromLong(illegal));
}

/* ---- read_rows --------------------------------------------------------------- */

/* Of a longer range Linux reads only as much as the device takes in one request. */
enum { ADVISED_NBYTES = 128 << 10 };

/* Rows that follow each other in the file and in the output; of spans of bytes, each byte
 * is a row. */
typedef struct {
    int64_t row;
    Py_ssize_t out_row, count;
} Fragment;

static int
by_row(const void *one, const void *other)
{
    int64_t first = ((const Fragment *)one)->row, second = ((const Fragment *)other)->row;
    return (first > second) - (first < second);
}

static Py_ssize_t
find_fragments(const Wanted *wanted, Fragment *fragments)
{
    Py_ssize_t some = 0;
    for (Py_ssize_t i = 0; i < wanted->count; i++) {
        if (i > 0 && wanted->rows[i] == wanted->rows[i - 1] + 1)
            fragments[some - 1].count++;
        else
            fragments[some++] = (Fragment){wanted->rows[i], i, 1};
    }
    return some;
}

static int
read_fragment(int fd, char *to, size_t nbytes, int64_t offset)
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
    const Fragment *fragments;
} ReadAhead;

/* Requests all fragments from the disk, in the order in which they are read. The
 * requests take a core half of the time that the disk needs, and the copies most of the
 * rest. */
static void *
advise_all(void *argument)
{
    const ReadAhead *read_ahead = argument;
    for (Py_ssize_t i = 0; i < read_ahead->count; i++) {
        int64_t offset = read_ahead->fragments[i].row * read_ahead->stride;
        int64_t stop = offset + read_ahead->fragments[i].count * read_ahead->stride;
        for (; offset < stop; offset += ADVISED_NBYTES) {
            int64_t left = stop - offset;
            off_t nbytes = (off_t)(left < ADVISED_NBYTES ? left : ADVISED_NBYTES);
            posix_fadvise(read_ahead->fd, (off_t)offset, nbytes, POSIX_FADV_WILLNEED);
        }
    }
    return NULL;
}

/* Requests the fragments in another thread, or here if no thread can be started. */
static int
start_read_ahead(ReadAhead *read_ahead, pthread_t *thread)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int begun = pthread_create(thread, NULL, advise_all, read_ahead) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!begun)
        advise_all(read_ahead);
    return begun;
}

static int
read_all(int fd, Fragment *fragments, Py_ssize_t some, Py_ssize_t stride, char *out,
         int in_thread)
{
    qsort(fragments, (size_t)some, sizeof *fragments, by_row);
    ReadAhead read_ahead = {fd, some, stride, fragments};
    pthread_t thread;
    int done = 1, begun = in_thread && start_read_ahead(&read_ahead, &thread);
    for (Py_ssize_t i = 0; done && i < some; i++) {
        const Fragment *fragment = &fragments[i];
        done = read_fragment(fd, out + fragment->out_row * stride,
                             (size_t)(fragment->count * stride),
                             fragment->row * stride) == 0;
    }
    if (begun)
        pthread_join(thread, NULL);
    return done;
}

static PyObject *
read_rows(PyObject *module, PyObject *args)
{
    PyObject *rows, *out;
    Buffers buffers = {.name = "read_rows"};
    Py_ssize_t stride;
    Wanted wanted;
    int fd, read_ahead, done = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "inOOp:read_rows", &fd, &stride, &rows, &out,
                          &read_ahead))
        return NULL;
    if (stride < 1)
        return refuse(&buffers, "rows must have at least one byte");
    if (read_wanted(&buffers, rows, out, stride, PY_SSIZE_T_MAX / stride, &wanted) < 0)
        return release(&buffers, NULL);
    Fragment *fragments = malloc(((size_t)wanted.count + 1) * sizeof *fragments);
    /* A descriptor of its own: if another thread closes `fd` during the reads, its number
     * may soon be that of another file. */
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fragments != NULL && own >= 0) {
        Py_BEGIN_ALLOW_THREADS
        Py_ssize_t some = find_fragments(&wanted, fragments);
        done = read_all(own, fragments, some, stride, wanted.out, read_ahead);
        Py_END_ALLOW_THREADS
    }
    if (own >= 0)
        close(own);
    free(fragments);
    return release(&buffers, PyBool_FromLong(done));
}

/* ---- read_spans -------------------------------------------------------------- */

static PyObject *
read_spans(PyObject *module, PyObject *args)
{
    PyObject *begins, *nbytes, *out;
    Buffers buffers = {.name = "read_spans"};
    Py_ssize_t count, num_sizes, out_nbytes, some = 0, at = 0;
    const int64_t *begin, *size;
    char *to;
    int fd, read_ahead, done = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "iOOOp:read_spans", &fd, &begins, &nbytes, &out,
                          &read_ahead))
        return NULL;
    if (!(begin = acquire(&buffers, begins, 0, &count, 8)) ||
        !(size = acquire(&buffers, nbytes, 0, &num_sizes, 8)) ||
        !(to = acquire(&buffers, out, 1, &out_nbytes, 1)))
        return release(&buffers, NULL);
    if (num_sizes != count || !inside(begin, size, count, PY_SSIZE_T_MAX) ||
        !together(size, count, out_nbytes))
        return refuse(&buffers, "spans must exist, and out must hold all of them");
    Fragment *fragments = malloc(((size_t)count + 1) * sizeof *fragments);
    /* As in `read_rows`. */
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fragments != NULL && own >= 0) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; at += size[i++])
            if (size[i])
                fragments[some++] = (Fragment){begin[i], at, (Py_ssize_t)size[i]};
        done = read_all(own, fragments, some, 1, to, read_ahead);
        Py_END_ALLOW_THREADS
    }
    if (own >= 0)
        close(own);
    free(fragments);
    return release(&buffers, PyBool_FromLong(done));
}

/* ---- populate ---------------------------------------------------------------- */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static PyObject *
populate(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "populate takes 2 arguments, got %zd",
                            nargs);
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
    {"copy_spans", copy_spans, METH_VARARGS, NULL},
    {"find_values", find_values, METH_VARARGS, NULL},
    {"read_rows", read_rows, METH_VARARGS, NULL},
    {"read_spans", read_spans, METH_VARARGS, NULL},
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
