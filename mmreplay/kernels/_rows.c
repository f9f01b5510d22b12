/* Rows of bytes: packed, marked and published. rows.py is the twin of
 * each function and says what it does; both write the same bytes and refuse the same
 * arguments.
 * Bytes are little-endian, as on disk: elsewhere the twins serve. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the twins in rows.py serve where bytes are big-endian"
#endif

enum { START = 1, TERMINATED = 2, TRUNCATED = 4, FINAL = 8 };
enum { END = TERMINATED | TRUNCATED };

/* Copies as few and as wide words as cover the bytes: two may overlap. */
static inline void
copy(char *to, const char *from, size_t nbytes)
{
    if (nbytes >= 16) {
        size_t done = 0;
        for (; done + 16 <= nbytes; done += 16)
            memcpy(to + done, from + done, 16);
        memcpy(to + nbytes - 16, from + nbytes - 16, 16);
    }
    else if (nbytes >= 8) {
        uint64_t first, last;
        memcpy(&first, from, 8);
        memcpy(&last, from + nbytes - 8, 8);
        memcpy(to, &first, 8);
        memcpy(to + nbytes - 8, &last, 8);
    }
    else if (nbytes == 4)
        memcpy(to, from, 4);
    else
        for (size_t at = 0; at < nbytes; at++)
            to[at] = from[at];
}

static int
contiguous(PyObject *value, Py_buffer *view, int writable)
{
    return PyObject_GetBuffer(value, view,
                              PyBUF_SIMPLE | (writable ? PyBUF_WRITABLE : 0));
}

#include "_rows_sum.h"
#include "_rows_slot.h"
#include "_rows_packer.h"
#include "_rows_append.h"
#include "_rows_values.h"
#include "_rows_blocks.h"

/* ---- mark ------------------------------------------------------------------ */

typedef struct {
    Py_buffer view;
    const char *at;
    Py_ssize_t rows, items;
} Ends;

/* Bools [T, N] of any strides, without an axis that is 1 long, or None. */
static int
read_ends(PyObject *value, Ends *ends, Py_ssize_t steps, Py_ssize_t envs)
{
    static const char none = 0;
    if (value == Py_None) {
        *ends = (Ends){.at = &none};
        return 0;
    }
    if (PyObject_GetBuffer(value, &ends->view, PyBUF_STRIDED_RO) < 0)
        return -1;
    const Py_ssize_t *shape = ends->view.shape, *strides = ends->view.strides;
    ends->at = ends->view.buf;
    if (ends->view.itemsize == 1 && ends->view.ndim == 2 && shape[0] == steps &&
        shape[1] == envs) {
        ends->rows = strides[0];
        ends->items = strides[1];
        return 0;
    }
    if (ends->view.itemsize == 1 && ends->view.ndim == 1 && shape[0] == steps * envs &&
        (steps == 1 || envs == 1)) {
        ends->rows = envs == 1 ? strides[0] : envs;
        ends->items = envs == 1 ? 1 : strides[0];
        return 0;
    }
    PyBuffer_Release(&ends->view);
    PyErr_Format(PyExc_ValueError, "mark: ends must be bools [%zd, %zd]", steps, envs);
    return -1;
}

/* Whether both ends are there and lie as the flags do. */
static int
flat(const Ends *first, const Ends *second, Py_ssize_t envs)
{
    return first->items == 1 && second->items == 1 && first->rows == envs &&
           second->rows == envs;
}

/* `mark_rows` without final rows: a row starts an episode if the row before it ended
 * one, so that many rows are marked at once. */
static void
mark_flat(unsigned char *restrict out, const unsigned char *before,
          const char *restrict first, const char *restrict second, Py_ssize_t count,
          Py_ssize_t envs)
{
    for (Py_ssize_t i = 0; i < count; i++)
        out[i] = (unsigned char)((first[i] ? TERMINATED : 0) |
                                 (second[i] ? TRUNCATED : 0));
    for (Py_ssize_t i = 0; i < envs && i < count; i++)
        out[i] |= before[i] & (FINAL | END) ? START : 0;
    for (Py_ssize_t i = 0; i + envs < count; i++)
        out[i + envs] |= (unsigned char)((first[i] | second[i]) ? START : 0);
}

static void
mark_rows(unsigned char *out, const unsigned char *before, const Ends *terminated,
          const Ends *truncated, int final_follows, Py_ssize_t steps, Py_ssize_t envs)
{
    for (Py_ssize_t env = 0; env < envs; env++) {
        unsigned last = before[env];
        const char *first = terminated->at + env * terminated->items;
        const char *second = truncated->at + env * truncated->items;
        for (Py_ssize_t step = 0; step < steps; step++) {
            unsigned flags = (*first ? TERMINATED : 0) | (*second ? TRUNCATED : 0);
            if (last & (final_follows ? FINAL : FINAL | END))
                flags |= START;
            /* What the reset call returned beside the final row is no step. */
            if (final_follows && (last & END))
                flags = FINAL;
            out[step * envs + env] = (unsigned char)flags;
            last = flags;
            first += terminated->rows;
            second += truncated->rows;
        }
    }
}

static PyObject *
mark_views(Py_buffer *out, Py_buffer *before, PyObject *terminated,
           PyObject *truncated, int final_follows)
{
    Ends first, second;
    Py_ssize_t envs = before->len, steps = envs ? out->len / envs : 0;
    if (envs < 1 || steps * envs != out->len)
        return PyErr_Format(PyExc_ValueError,
                            "mark: out must hold whole steps of %zd environments, got "
                            "%zd rows",
                            envs, out->len);
    if (read_ends(terminated, &first, steps, envs) < 0)
        return NULL;
    if (read_ends(truncated, &second, steps, envs) < 0) {
        if (terminated != Py_None)
            PyBuffer_Release(&first.view);
        return NULL;
    }
    if (!final_follows && flat(&first, &second, envs))
        mark_flat(out->buf, before->buf, first.at, second.at, out->len, envs);
    else
        mark_rows(out->buf, before->buf, &first, &second, final_follows, steps, envs);
    if (terminated != Py_None)
        PyBuffer_Release(&first.view);
    if (truncated != Py_None)
        PyBuffer_Release(&second.view);
    Py_RETURN_NONE;
}

static PyObject *
mark(PyObject *module, PyObject *args)
{
    PyObject *target, *earlier, *terminated, *truncated, *result = NULL;
    Py_buffer out, before;
    int final_follows;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOp:mark", &target, &earlier, &terminated,
                          &truncated, &final_follows))
        return NULL;
    if (contiguous(target, &out, 1) < 0)
        return NULL;
    if (contiguous(earlier, &before, 0) == 0) {
        result = mark_views(&out, &before, terminated, truncated, final_follows);
        PyBuffer_Release(&before);
    }
    PyBuffer_Release(&out);
    return result;
}

/* ---- module ---------------------------------------------------------------- */

static int
execute(PyObject *module)
{
    PyType_Spec *specs[] = {&Slot_spec, &RecordPacker_spec, &Append_spec};
    const char *names[] = {"Slot", "RecordPacker", "Append"};
    fill_tables();
    for (int i = 0; i < 3; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (type == NULL)
            return -1;
        int status = PyModule_AddObjectRef(module, names[i], type);
        Py_DECREF(type);
        if (status < 0)
            return -1;
    }
    return 0;
}

static PyMethodDef functions[] = {
    {"mark", mark, METH_VARARGS, NULL},
    {"crc32c", crc32c, METH_VARARGS, NULL},
    {"sum_spans", sum_spans, METH_VARARGS, NULL},
    {"measure_values", measure_values, METH_VARARGS, NULL},
    {"join_values", join_values, METH_VARARGS, NULL},
    {"pack_values", pack_values, METH_VARARGS, NULL},
    {"store_value", (PyCFunction)(void (*)(void))store_value, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "mmreplay.kernels._rows", NULL, 0, functions, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__rows(void)
{
    return PyModuleDef_Init(&module);
}
