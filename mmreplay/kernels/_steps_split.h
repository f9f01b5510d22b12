/* Records that lie one after another, copied into columns; steps.py says what `split`
 * does. */

/* Records whose one field is copied before the next field: the first cache holds them. */
enum { SPLIT_NBYTES = 16 << 10 };

static void
split_column(char *to, const char *from, size_t nbytes, size_t stride, int64_t rows)
{
    /* A copy of a constant size takes no call. */
#define COPY_SIZE(size)                                                                \
    case size:                                                                         \
        for (int64_t i = 0; i < rows; i++)                                             \
            memcpy(to + i * size, from + (size_t)i * stride, size);                    \
        return
    switch (nbytes) {
        COPY_SIZE(1);
        COPY_SIZE(2);
        COPY_SIZE(4);
        COPY_SIZE(8);
        COPY_SIZE(16);
        COPY_SIZE(32);
        COPY_SIZE(64);
    }
#undef COPY_SIZE
    for (int64_t i = 0; i < rows; i++)
        memcpy(to + (size_t)i * nbytes, from + (size_t)i * stride, nbytes);
}

/* Offset in a record, bytes there, and where its column begins. */
typedef struct {
    int64_t offset, nbytes, out_start;
} SplitField;

static int
split_fields_fit(const SplitField *fields, Py_ssize_t some, int64_t stride, int64_t count,
                 int64_t out_nbytes)
{
    for (Py_ssize_t i = 0; i < some; i++) {
        const SplitField *field = &fields[i];
        if (field->offset < 0 || field->nbytes < 1 || field->out_start < 0 ||
            field->nbytes > stride || field->offset > stride - field->nbytes ||
            field->out_start > out_nbytes ||
            count > (out_nbytes - field->out_start) / field->nbytes)
            return 0;
    }
    return 1;
}

static PyObject *
split(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "split"};
    Py_ssize_t nbytes, numbers, out_nbytes;
    (void)module;
    if (expect(buffers.name, nargs, 6) < 0)
        return NULL;
    int64_t stride = PyLong_AsLongLong(args[1]), first = PyLong_AsLongLong(args[2]);
    int64_t count = PyLong_AsLongLong(args[3]);
    const char *records;
    const SplitField *fields;
    char *out;
    if (PyErr_Occurred() || !(records = acquire(&buffers, args[0], 0, &nbytes, 1)) ||
        !(fields = acquire(&buffers, args[4], 0, &numbers, 8)) ||
        !(out = acquire(&buffers, args[5], 1, &out_nbytes, 1)))
        return release(&buffers, NULL);
    int64_t num_records = stride < 1 ? 0 : nbytes / stride;
    if (stride < 1 || first < 0 || count < 0 || first > num_records ||
        count > num_records - first || numbers % 3 ||
        !split_fields_fit(fields, numbers / 3, stride, count, out_nbytes))
        return refuse(&buffers, "records must be in the ring, and out must hold all");
    int64_t max_records = stride < SPLIT_NBYTES ? SPLIT_NBYTES / stride : 1;
    PyThreadState *state = count >= LONG_BATCH ? PyEval_SaveThread() : NULL;
    for (int64_t done = 0; done < count; done += max_records) {
        int64_t rows = count - done < max_records ? count - done : max_records;
        const char *from = records + (first + done) * stride;
        for (Py_ssize_t i = 0; i < numbers / 3; i++)
            split_column(out + fields[i].out_start + done * fields[i].nbytes,
                         from + fields[i].offset, (size_t)fields[i].nbytes,
                         (size_t)stride, rows);
    }
    if (state)
        PyEval_RestoreThread(state);
    return release(&buffers, Py_NewRef(Py_None));
}
