/* Memory of the caller in many runs, an engine's pages say: looked at once, held until it is let go. */
#ifndef KVSTORED_SPREAD_H
#define KVSTORED_SPREAD_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "pieces.h"

/* Shorter runs are not worth a call of their own: whoever has such memory copies it in another way. */
#define RUN_BYTES_MIN 256

/* Memory of the caller in runs, held for as long as this lives. */
typedef struct {
    PyObject_HEAD
    Py_buffer *views;
    struct run *runs;
    size_t view_count, run_count, bytes;
    bool is_writable;
} Spread;

static PyTypeObject *spread_type;

/* `items` with room for one more than `count`, NULL with an exception where there is no memory. It doubles at powers of two. */
static void *grown(void *items, size_t count, size_t item_bytes)
{
    if (count & (count - 1) || count == 1)
        return items;
    void *more = PyMem_Realloc(items, (count ? 2 * count : 2) * item_bytes);
    return more ? more : PyErr_NoMemory();
}

static bool refuse(const char *what)
{
    PyErr_SetString(PyExc_ValueError, what);
    return false;
}

static void spread_dealloc(PyObject *self)
{
    Spread *spread = (Spread *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (size_t i = 0; i < spread->view_count; i++)
        PyBuffer_Release(&spread->views[i]);
    PyMem_Free(spread->views);
    PyMem_Free(spread->runs);
    PyObject_Free(self);
    Py_DECREF(type);
}

static bool spread_run(Spread *spread, uint8_t *at, size_t bytes)
{
    struct run *last = spread->run_count ? &spread->runs[spread->run_count - 1] : NULL;
    spread->bytes += bytes;
    if (last && last->at + last->bytes == at) {
        last->bytes += bytes;
        return true;
    }
    struct run *runs = grown(spread->runs, spread->run_count, sizeof *runs);
    if (!runs)
        return false;
    spread->runs = runs;
    spread->runs[spread->run_count++] = (struct run){at, bytes};
    return true;
}

/* The runs of an array in the order of its elements; `outer` dimensions are not contiguous with what is inside of them. */
static bool spread_array(Spread *spread, const Py_buffer *view, int outer, size_t run_bytes)
{
    Py_ssize_t count = 1;
    for (int d = 0; d < outer; d++)
        count *= view->shape[d];
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t rest = i, offset = 0;
        for (int d = outer - 1; d >= 0; d--) {
            offset += rest % view->shape[d] * view->strides[d];
            rest /= view->shape[d];
        }
        if (!spread_run(spread, (uint8_t *)view->buf + offset, run_bytes))
            return false;
    }
    return true;
}

/* 1: added; 0: its runs are too short; -1: an error. */
static int spread_part(Spread *spread, PyObject *part)
{
    Py_buffer *views = grown(spread->views, spread->view_count, sizeof *views);
    if (!views)
        return -1;
    spread->views = views;
    Py_buffer *view = &views[spread->view_count];
    if (PyObject_GetBuffer(part, view, PyBUF_RECORDS_RO))
        return -1;
    spread->view_count++;
    if (view->format && strchr(view->format, 'O'))
        return refuse("an array of objects has no bytes") ? 1 : -1;
    spread->is_writable &= !view->readonly;
    Py_ssize_t run_bytes = view->itemsize;
    int outer = view->ndim;
    while (outer && (view->strides[outer - 1] == run_bytes || view->shape[outer - 1] == 1))
        run_bytes *= view->shape[--outer];
    if (!view->len)
        return 1;
    if (outer && run_bytes < RUN_BYTES_MIN)
        return 0;
    return spread_array(spread, view, outer, (size_t)run_bytes) ? 1 : -1;
}

static PyObject *spread(PyObject *Py_UNUSED(module), PyObject *parts)
{
    Py_ssize_t count = PyTuple_Size(parts);
    Spread *made = count < 0 ? NULL : PyObject_New(Spread, spread_type);
    int added = 1;
    if (!made)
        return NULL;
    made->views = NULL;
    made->runs = NULL;
    made->view_count = made->run_count = made->bytes = 0;
    made->is_writable = true;
    for (Py_ssize_t i = 0; i < count && added > 0; i++)
        added = spread_part(made, PyTuple_GetItem(parts, i));
    if (added > 0)
        return (PyObject *)made;
    Py_DECREF(made);
    return added ? NULL : Py_NewRef(Py_None);
}

#endif
