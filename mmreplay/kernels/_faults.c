/* Reads of mapped pages that their file has no more, survived: faults.py says what each
 * function does.
 *
 * Such a read is a SIGBUS. In a thread that asked for it the handler puts a page of
 * zeros in the place of the missing one and counts it. The page is never written: a
 * mapping that is shown is read only, as is what replaces it. All other faults go to
 * the handler that was there before. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static _Thread_local int depth;
static atomic_long faults;
static uintptr_t page_nbytes;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int refused;
static struct sigaction former;

static void
on_fault(int number, siginfo_t *info, void *context)
{
    (void)context;
    int saved = errno;
    if (info->si_code == BUS_ADRERR && depth > 0) {
        uintptr_t address = (uintptr_t)info->si_addr & ~(page_nbytes - 1);
        /* Counted first: a thread that reads the zeros finds the count changed. */
        atomic_fetch_add(&faults, 1);
        void *page = mmap((void *)address, page_nbytes, PROT_READ,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        if (page != MAP_FAILED) {
            errno = saved;
            return;
        }
    }
    /* The read is repeated, and ends as it would have without this handler. */
    sigaction(SIGBUS, &former, NULL);
    if (info->si_code <= 0)
        raise(number); /* Another process sent it: there is no read to repeat. */
    errno = saved;
}

static void
install(void)
{
    struct sigaction action = {0};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    page_nbytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    refused = sigaction(SIGBUS, &action, &former) != 0 ? errno : 0;
}

static PyObject *
begin(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    pthread_once(&once, install);
    if (refused) {
        errno = refused;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    depth++;
    return PyLong_FromLong(atomic_load(&faults));
}

static PyObject *
end(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    if (depth > 0)
        depth--;
    return PyLong_FromLong(atomic_load(&faults));
}

static PyObject *
count(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromLong(atomic_load(&faults));
}

/* ---- module ------------------------------------------------------------------ */

static PyMethodDef functions[] = {
    {"begin", begin, METH_NOARGS, NULL},
    {"end", end, METH_NOARGS, NULL},
    {"count", count, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "mmreplay.kernels._faults", NULL, 0, functions, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__faults(void)
{
    return PyModuleDef_Init(&module);
}
