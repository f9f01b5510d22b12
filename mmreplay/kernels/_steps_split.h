/* Records that lie one after another, put into columns; steps.py says what `split`
 * does. */

/* Records looked at before the next field: the first cache holds them. */
enum { SPLIT_NBYTES = 16 << 10 };

static void
split_column(char *to, const char *from, size_t nbytes, size_t stride, int64_t rows)
{
    /* What is copied by a number that is known takes no call. */
#define EACH(size)                                                                     \
    case size:                                                                         \
        for (int64_t i = 0; i < rows; i++)                                             \
            memcpy(to + i * size, from + (size_t)i * stride, size);                    \
        return
    switch (nbytes) {
        EACH(1);
        EACH(2);
        EACH(4);
        EACH(8);
        EACH(16);
        EACH(32);
        EACH(64);
    }
#undef EACH
    for (int64_t i = 0; i < rows; i++)
        memcpy(to + (size_t)i * nbytes, from + (size_t)i * stride, nbytes);
}

/* Offset in a record, bytes there, and where its column begins. */
typedef struct {
    int64_t offset, nbytes, place;
} Part;

static int
parts_fit(const Part *parts, Py_ssize_t some, int64_t stride, int64_t count,
          int64_t room)
{
    for (Py_ssize_t i = 0; i < some; i++) {
        const Part *part = &parts[i];
        if (part->offset < 0 || part->nbytes < 1 || part->place < 0 ||
            part->nbytes > stride || part->offset > stride - part->nbytes ||
            part->place > room || count > (room - part->place) / part->nbytes)
            return 0;
    }
    return 1;
}

static PyObject *
split(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "split"};
    Py_ssize_t nbytes, numbers, room;
    (void)module;
    if (expect(held.name, given, 6) < 0)
        return NULL;
    int64_t stride = PyLong_AsLongLong(args[1]), first = PyLong_AsLongLong(args[2]);
    int64_t count = PyLong_AsLongLong(args[3]);
    const char *records;
    const Part *parts;
    char *out;
    if (PyErr_Occurred() || !(records = hold(&held, args[0], 0, &nbytes, 1)) ||
        !(parts = hold(&held, args[4], 0, &numbers, 8)) ||
        !(out = hold(&held, args[5], 1, &room, 1)))
        return release(&held, NULL);
    int64_t whole = stride < 1 ? 0 : nbytes / stride;
    if (stride < 1 || first < 0 || count < 0 || first > whole ||
        count > whole - first || numbers % 3 ||
        !parts_fit(parts, numbers / 3, stride, count, room))
        return refuse(&held, "expected records of the ring, and room for all");
    int64_t most = stride < SPLIT_NBYTES ? SPLIT_NBYTES / stride : 1;
    PyThreadState *state = count >= LONG_BATCH ? PyEval_SaveThread() : NULL;
    for (int64_t done = 0; done < count; done += most) {
        int64_t rows = count - done < most ? count - done : most;
        const char *from = records + (first + done) * stride;
        for (Py_ssize_t i = 0; i < numbers / 3; i++)
            split_column(out + parts[i].place + done * parts[i].nbytes,
                         from + parts[i].offset, (size_t)parts[i].nbytes,
                         (size_t)stride, rows);
    }
    if (state)
        PyEval_RestoreThread(state);
    return release(&held, Py_NewRef(Py_None));
}
