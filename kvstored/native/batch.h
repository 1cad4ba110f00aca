/* What Python gives, as pieces: buffers are held until the batch ends, and everything is checked before the first byte is copied. */
#ifndef KVSTORED_BATCH_H
#define KVSTORED_BATCH_H

#include "spread.h"

/* Below this, letting others run costs more than it gives them. */
#define ALONE_BYTES_MAX ((size_t)128 << 10)
/* By number, since the runs move while they are added. */
struct planned {
    size_t to, from, bytes;
};

struct batch {
    Py_buffer *views;
    struct run *runs;
    struct planned *pieces;
    size_t view_count, run_count, piece_count, bytes;
};

static void end_batch(struct batch *batch)
{
    for (size_t i = 0; i < batch->view_count; i++)
        PyBuffer_Release(&batch->views[i]);
    PyMem_Free(batch->views);
    PyMem_Free(batch->runs);
    PyMem_Free(batch->pieces);
}

static bool add_run(struct batch *batch, uint8_t *at, size_t bytes)
{
    if (!bytes)
        return true;
    struct run *runs = grown(batch->runs, batch->run_count, sizeof *runs);
    if (!runs)
        return false;
    batch->runs = runs;
    batch->runs[batch->run_count++] = (struct run){at, bytes};
    return true;
}

static bool add_piece(struct batch *batch, size_t to, size_t from, size_t bytes)
{
    struct planned *pieces = grown(batch->pieces, batch->piece_count, sizeof *pieces);
    if (!pieces)
        return false;
    batch->pieces = pieces;
    batch->pieces[batch->piece_count++] = (struct planned){to, from, bytes};
    batch->bytes += bytes;
    return true;
}

/* The memory of a contiguous buffer; of numbers, where it is written to: bytes must not become references to objects. */
static bool hold(struct batch *batch, PyObject *object, bool is_written, struct run *run)
{
    Py_buffer *views = grown(batch->views, batch->view_count, sizeof *views);
    if (!views)
        return false;
    batch->views = views;
    Py_buffer *view = &views[batch->view_count];
    if (PyObject_GetBuffer(object, view, is_written ? PyBUF_CONTIG | PyBUF_FORMAT : PyBUF_SIMPLE))
        return false;
    batch->view_count++;
    if (is_written && view->format && strchr(view->format, 'O'))
        return refuse("an array of objects has no bytes to write to");
    *run = (struct run){view->buf, (size_t)view->len};
    return true;
}

static bool add_all(struct batch *batch, PyObject *buffers, bool is_written, size_t *bytes)
{
    struct run run;
    Py_ssize_t count = PyTuple_Size(buffers);
    if (count < 0)
        return false;
    *bytes = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!hold(batch, PyTuple_GetItem(buffers, i), is_written, &run) ||
            !add_run(batch, run.at, run.bytes))
            return false;
        *bytes += run.bytes;
    }
    return true;
}

/* The runs of a spread where they lie in its piece, `ranges` of it; the rest of the piece is nowhere. */
static bool add_spread(struct batch *batch, const Spread *spread, PyObject *ranges, size_t bytes)
{
    struct cursor next = {spread->runs, 0};
    size_t given = spread->bytes, at = 0;
    Py_ssize_t count = ranges == Py_None ? 1 : PyTuple_Size(ranges);
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t offset = 0, length = (Py_ssize_t)bytes;
        if (ranges != Py_None && !PyArg_ParseTuple(PyTuple_GetItem(ranges, i), "nn", &offset, &length))
            return false;
        if (offset < (Py_ssize_t)at || length < 0 || (size_t)offset > bytes ||
            (size_t)length > bytes - (size_t)offset || (size_t)length > given)
            return refuse("buffers do not fit their piece");
        if (!add_run(batch, NULL, (size_t)offset - at))
            return false;
        at = (size_t)offset + (size_t)length;
        given -= (size_t)length;
        for (size_t left = (size_t)length; left;) {
            size_t some = least(left, left_of(&next));
            if (!add_run(batch, place_of(&next), some))
                return false;
            advance(&next, some);
            left -= some;
        }
    }
    if (count < 0 || given)
        return count < 0 ? false : refuse("buffers do not fit their piece");
    return add_run(batch, NULL, bytes - at);
}

/* (private, shared, sizes): a Run of kvstored/client/copying.py. */
static bool add_private(struct batch *batch, PyObject *item, bool is_inward)
{
    PyObject *private, *shared, *sizes;
    struct run mine;
    size_t there = batch->run_count, shared_bytes, done = 0;
    if (!PyArg_ParseTuple(item, "OO!O!", &private, &PyTuple_Type, &shared, &PyTuple_Type, &sizes) ||
        !hold(batch, private, !is_inward, &mine) || !add_all(batch, shared, is_inward, &shared_bytes))
        return false;
    Py_ssize_t count = PyTuple_Size(sizes);
    if (shared_bytes != mine.bytes || (count > 1 && batch->run_count != there + 1))
        return refuse("both sides of a run have the same bytes, several pieces one extent");
    uint8_t *theirs = count > 1 ? batch->runs[there].at : NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        size_t bytes = PyLong_AsSize_t(PyTuple_GetItem(sizes, i));
        if (PyErr_Occurred() || bytes == 0 || bytes > mine.bytes - done)
            return PyErr_Occurred() ? false : refuse("the sizes of a run are those of its pieces");
        if (theirs) {
            there = batch->run_count;
            if (!add_run(batch, theirs + done, bytes))
                return false;
        }
        size_t here = batch->run_count;
        if (!add_run(batch, mine.at + done, bytes) ||
            !add_piece(batch, is_inward ? there : here, is_inward ? here : there, bytes))
            return false;
        done += bytes;
    }
    return done == mine.bytes || refuse("the sizes of a run are those of its pieces");
}

/* (shared, spread, ranges): a Walk of kvstored/client/scatter.py. */
static bool add_walk(struct batch *batch, PyObject *item, bool is_inward)
{
    PyObject *shared, *spread, *ranges;
    size_t there = batch->run_count, bytes;
    if (!PyArg_ParseTuple(item, "O!O!O", &PyTuple_Type, &shared, spread_type, &spread, &ranges) ||
        !add_all(batch, shared, is_inward, &bytes))
        return false;
    size_t here = batch->run_count;
    if (!is_inward && !((Spread *)spread)->is_writable)
        return refuse("a buffer to read into is not writable");
    if (is_inward && ranges != Py_None)
        return refuse("a piece is put whole");
    return add_spread(batch, (Spread *)spread, ranges, bytes) &&
           add_piece(batch, is_inward ? there : here, is_inward ? here : there, bytes);
}

static struct piece piece_of(const struct batch *batch, size_t i)
{
    const struct planned *planned = &batch->pieces[i];
    return (struct piece){batch->runs + planned->to, batch->runs + planned->from, planned->bytes};
}

#endif
