/* What happens to bytes on their way: patches between two images of the same weights, and FP8.
 *
 * Callers: weft/codec/, where the formats are described and the same is done in NumPy, slower, for machines without this
 * module. Addresses are not checked here; patches, which come from elsewhere, are. The interpreter lock is released.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 16384u            /* elements */
#define GROUP 256u              /* elements */
#define GROUPS (BLOCK / GROUP)
#define DENSE 0xFFFFu
#define ESCAPE 0x80u
#define MAGIC 0x31545057u       /* "WPT1" */

typedef struct {
    uint32_t magic, width;
    uint64_t num_elements, num_bytes, base, version;
} Header;

typedef struct {
    uint32_t offset; /* of the record, in units of 4 bytes */
    uint16_t changes, escapes;
} Entry;

typedef uint64_t Pair __attribute__((vector_size(16)));

static inline Pair load_pair(const unsigned char *src) {
    Pair pair;
    memcpy(&pair, src, sizeof pair);
    return pair;
}

static uint64_t padded(uint64_t size) { return (size + 3) & ~UINT64_C(3); }

static uint64_t record_bytes(uint32_t width, uint64_t elements, uint32_t changes, uint32_t escapes) {
    if (changes == 0) return 0;
    if (changes == DENSE) return padded(elements * width);
    return padded(GROUPS + (uint64_t)changes * (1 + (width == 4 ? 4 : 1)) + 2 * (uint64_t)escapes);
}

/* What one block has found so far. */
typedef struct {
    uint32_t changes, escapes;
    unsigned char *places, *values;
    uint16_t *wide;
} Found;

static inline __attribute__((always_inline)) void add_change(Found *found, uint32_t width, uint32_t place, uint32_t old, uint32_t now) {
    found->places[found->changes] = (unsigned char)place;
    if (width == 1) {
        found->values[found->changes] = (unsigned char)now;
    } else if (width == 2) {
        int32_t difference = (int16_t)(uint16_t)(now - old);
        int narrow = difference >= -127 && difference <= 127;
        found->values[found->changes] = narrow ? (unsigned char)difference : ESCAPE;
        found->wide[found->escapes] = (uint16_t)now;
        found->escapes += !narrow;
    } else {
        memcpy(found->values + 4 * found->changes, &now, 4);
    }
    found->changes++;
}

typedef uint8_t Bytes8 __attribute__((vector_size(8)));
typedef uint16_t Halves8 __attribute__((vector_size(16)));
typedef uint32_t Words8 __attribute__((vector_size(32)));

/* Which of eight elements differ, as bytes of zeros or ones. */
static inline __attribute__((always_inline)) uint64_t changed_of_eight(uint32_t width, const unsigned char *now, const unsigned char *old) {
    Bytes8 changed;
    if (width == 1) {
        Bytes8 a, b;
        memcpy(&a, now, sizeof a), memcpy(&b, old, sizeof b);
        changed = (Bytes8)(a != b);
    } else if (width == 2) {
        Halves8 a, b;
        memcpy(&a, now, sizeof a), memcpy(&b, old, sizeof b);
        changed = __builtin_convertvector((Halves8)(a != b), Bytes8);
    } else {
        Words8 a, b;
        memcpy(&a, now, sizeof a), memcpy(&b, old, sizeof b);
        changed = __builtin_convertvector((Words8)(a != b), Bytes8);
    }
    uint64_t bits;
    memcpy(&bits, &changed, sizeof bits);
    return bits;
}

/* One group of elements; `size` in bytes. */
static inline __attribute__((always_inline)) void add_group(Found *found, uint32_t width, const unsigned char *now, const unsigned char *old, uint32_t size) {
    uint32_t at = 0;
    for (; at + 64 <= size; at += 64) {
        Pair a = load_pair(now + at) ^ load_pair(old + at), b = load_pair(now + at + 16) ^ load_pair(old + at + 16);
        Pair c = load_pair(now + at + 32) ^ load_pair(old + at + 32), d = load_pair(now + at + 48) ^ load_pair(old + at + 48);
        Pair any = a | b | c | d;
        if ((any[0] | any[1]) == 0) continue;
        for (uint32_t eight = at; eight < at + 64; eight += 8 * width) {
            uint64_t changed = changed_of_eight(width, now + eight, old + eight) & UINT64_C(0x0101010101010101);
            for (; changed; changed &= changed - 1) {
                uint32_t which = (uint32_t)__builtin_ctzll(changed) / 8, old_bits = 0, new_bits = 0;
                memcpy(&new_bits, now + eight + which * width, width), memcpy(&old_bits, old + eight + which * width, width);
                add_change(found, width, eight / width + which, old_bits, new_bits);
            }
        }
    }
    for (; at < size; at += width) {
        uint32_t old_bits = 0, new_bits = 0;
        memcpy(&new_bits, now + at, width), memcpy(&old_bits, old + at, width);
        if (new_bits != old_bits) add_change(found, width, at / width, old_bits, new_bits);
    }
}

/* One block; returns where the next record begins, or NULL if it does not fit. */
static inline __attribute__((always_inline)) unsigned char *encode_block(uint32_t width, const unsigned char *now, const unsigned char *old, uint64_t elements, Entry *entry, unsigned char *record, const unsigned char *end) {
    unsigned char counts[GROUPS] = {0}, places[BLOCK], values[4 * BLOCK];
    uint16_t wide[BLOCK + 1];
    Found found = {0, 0, places, values, wide};
    int fits = old != NULL; /* without a base everything is dense */
    for (uint64_t first = 0, group = 0; first < elements && fits; first += GROUP, group++) {
        uint64_t count = elements - first < GROUP ? elements - first : GROUP;
        uint32_t before = found.changes;
        add_group(&found, width, now + first * width, old + first * width, (uint32_t)(count * width));
        fits = found.changes - before < GROUP;
        counts[group] = (unsigned char)(found.changes - before);
    }
    if (!fits || record_bytes(width, elements, found.changes, found.escapes) >= padded(elements * width)) found.changes = DENSE, found.escapes = 0;
    uint64_t size = record_bytes(width, elements, found.changes, found.escapes);
    if (size > (uint64_t)(end - record)) return NULL;
    *entry = (Entry){0, (uint16_t)found.changes, (uint16_t)found.escapes};
    if (size == 0) return record;
    memset(record + size - 4, 0, 4);
    if (found.changes == DENSE) {
        memcpy(record, now, (size_t)(elements * width));
        return record + size;
    }
    uint64_t value_bytes = (uint64_t)found.changes * (width == 4 ? 4 : 1);
    memcpy(record, counts, GROUPS);
    memcpy(record + GROUPS, places, found.changes);
    memcpy(record + GROUPS + found.changes, values, (size_t)value_bytes);
    memcpy(record + GROUPS + found.changes + value_bytes, wide, (size_t)2 * found.escapes);
    return record + size;
}

static inline __attribute__((always_inline)) uint64_t encode(uint32_t width, const unsigned char *now, const unsigned char *old, uint64_t num_elements, unsigned char *out, uint64_t capacity) {
    uint64_t num_blocks = (num_elements + BLOCK - 1) / BLOCK;
    if (capacity < sizeof(Header) + num_blocks * sizeof(Entry)) return 0;
    unsigned char *record = out + sizeof(Header) + num_blocks * sizeof(Entry);
    for (uint64_t block = 0; block < num_blocks; block++) {
        uint64_t first = block * BLOCK, count = num_elements - first < BLOCK ? num_elements - first : BLOCK;
        Entry entry;
        unsigned char *next = encode_block(width, now + first * width, old ? old + first * width : NULL, count, &entry, record, out + capacity);
        if (!next) return 0;
        entry.offset = (uint32_t)((uint64_t)(record - out) / 4);
        memcpy(out + sizeof(Header) + block * sizeof(Entry), &entry, sizeof entry);
        record = next;
    }
    Header header = {MAGIC, width, num_elements, (uint64_t)(record - out), 0, 0};
    memcpy(out, &header, sizeof header);
    return header.num_bytes;
}

/* encode(new, base or 0, width, elements, out, capacity) -> bytes; 0: does not fit */
static PyObject *codec_encode(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long now, old, num_elements, out, capacity, size;
    unsigned int width;
    if (!PyArg_ParseTuple(args, "KKIKKK:encode", &now, &old, &width, &num_elements, &out, &capacity)) return NULL;
    if (width != 1 && width != 2 && width != 4) {
        PyErr_SetString(PyExc_ValueError, "elements have 1, 2 or 4 bytes");
        return NULL;
    }
    const unsigned char *a = (const unsigned char *)(uintptr_t)now, *b = (const unsigned char *)(uintptr_t)old;
    unsigned char *into = (unsigned char *)(uintptr_t)out;
    Py_BEGIN_ALLOW_THREADS
    if (width == 1) size = encode(1, a, b, num_elements, into, capacity);
    else if (width == 2) size = encode(2, a, b, num_elements, into, capacity);
    else size = encode(4, a, b, num_elements, into, capacity);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(size);
}

/* Whether one record is sound: its counts add up and no place lies outside its block. */
static const char *check_record(uint32_t width, const unsigned char *record, uint64_t elements, const Entry *entry) {
    uint32_t changes = 0, escapes = 0;
    const unsigned char *place = record + GROUPS;
    for (uint32_t group = 0; group < GROUPS; group++) {
        uint64_t first = (uint64_t)group * GROUP;
        uint64_t left = elements > first ? elements - first : 0;
        changes += record[group];
        if (changes > entry->changes) return "counts exceed the changes of a block";
        for (uint32_t i = 0; i < record[group]; i++, place++) {
            if (*place >= left) return "a place lies outside its block";
            if (i > 0 && place[-1] >= *place) return "places are not ascending";
        }
    }
    if (changes != entry->changes) return "counts are fewer than the changes of a block";
    if (width == 2) {
        for (uint32_t i = 0; i < changes; i++) escapes += place[i] == ESCAPE; /* the values follow the places */
    }
    return escapes == entry->escapes ? NULL : "escapes do not add up";
}

static const char *check(const unsigned char *patch, uint64_t size, uint32_t width, uint64_t num_elements) {
    Header header;
    if (size < sizeof header) return "shorter than a header";
    memcpy(&header, patch, sizeof header);
    if (header.magic != MAGIC) return "not a patch";
    if (header.width != width) return "another width of elements";
    if (header.num_elements != num_elements) return "another number of elements";
    if (header.num_bytes != size) return "another number of bytes";
    uint64_t num_blocks = num_elements / BLOCK + (num_elements % BLOCK != 0);
    if ((size - sizeof header) / sizeof(Entry) < num_blocks) return "shorter than its table of blocks";
    uint64_t first_record = sizeof header + num_blocks * sizeof(Entry);
    for (uint64_t block = 0; block < num_blocks; block++) {
        uint64_t first = block * BLOCK, count = num_elements - first < BLOCK ? num_elements - first : BLOCK;
        Entry entry;
        memcpy(&entry, patch + sizeof header + block * sizeof entry, sizeof entry);
        if (entry.changes != DENSE && entry.changes > count) return "more changes than elements";
        if (entry.escapes > entry.changes || (entry.escapes && (width != 2 || entry.changes == DENSE))) return "escapes where there can be none";
        uint64_t at = (uint64_t)entry.offset * 4, bytes = record_bytes(width, count, entry.changes, entry.escapes);
        if (bytes == 0) continue;
        if (at < first_record || at > size || bytes > size - at) return "a record lies outside the patch";
        if (entry.changes == DENSE) continue;
        const char *wrong = check_record(width, patch + at, count, &entry);
        if (wrong) return wrong;
    }
    return NULL;
}

/* check(patch, bytes, width, elements) -> what is wrong, or None */
static PyObject *codec_check(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long patch, size, num_elements;
    unsigned int width;
    if (!PyArg_ParseTuple(args, "KKIK:check", &patch, &size, &width, &num_elements)) return NULL;
    const char *wrong;
    Py_BEGIN_ALLOW_THREADS
    wrong = check((const unsigned char *)(uintptr_t)patch, size, width, num_elements);
    Py_END_ALLOW_THREADS
    if (wrong) return PyUnicode_FromString(wrong);
    Py_RETURN_NONE;
}

/* Where the elements of an image lie: rows of memory that follow each other in the image. */
typedef struct {
    const uint64_t *begin, *address, *length; /* in bytes */
    uint64_t num_rows, row;
} Rows;

/* The address of a byte of the image, and how many bytes follow it in the same row. Bytes are asked for in ascending order. */
static inline unsigned char *find(Rows *rows, uint64_t byte, uint64_t *left) {
    while (rows->row < rows->num_rows && byte >= rows->begin[rows->row] + rows->length[rows->row]) rows->row++;
    if (rows->row == rows->num_rows || byte < rows->begin[rows->row]) return NULL;
    uint64_t inside = byte - rows->begin[rows->row];
    *left = rows->length[rows->row] - inside;
    return (unsigned char *)(uintptr_t)(rows->address[rows->row] + inside);
}

static int apply_dense(Rows *rows, uint64_t byte, const unsigned char *raw, uint64_t size) {
    while (size > 0) {
        uint64_t left = 0;
        unsigned char *into = find(rows, byte, &left);
        if (!into) return -1;
        uint64_t step = left < size ? left : size;
        memcpy(into, raw, (size_t)step);
        byte += step, raw += step, size -= step;
    }
    return 0;
}

static inline __attribute__((always_inline)) int apply_record(uint32_t width, Rows *rows, uint64_t first, const unsigned char *record, const Entry *entry) {
    const unsigned char *place = record + GROUPS, *value = place + entry->changes;
    const unsigned char *wide = value + entry->changes;
    unsigned char *into = NULL;
    uint64_t from = 0, left = 0; /* the row at hand: `left` bytes from image byte `from` on are at `into` */
    for (uint32_t group = 0; group < GROUPS; group++) {
        for (uint32_t i = 0; i < record[group]; i++, place++) {
            uint64_t byte = (first + group * GROUP + *place) * width;
            if (byte - from >= left) {
                into = find(rows, byte, &left);
                if (!into || left < width) return -1;
                from = byte;
            }
            unsigned char *element = into + (byte - from);
            if (width == 1) {
                *element = *value++;
            } else if (width == 4) {
                memcpy(element, value, 4), value += 4;
            } else {
                uint16_t bits;
                if (*value == ESCAPE) {
                    memcpy(&bits, wide, 2), wide += 2;
                } else {
                    memcpy(&bits, element, 2);
                    bits = (uint16_t)(bits + (int8_t)*value);
                }
                memcpy(element, &bits, 2), value++;
            }
        }
    }
    return 0;
}

static inline __attribute__((always_inline)) int apply(uint32_t width, const unsigned char *patch, uint64_t num_elements, Rows *rows) {
    uint64_t num_blocks = (num_elements + BLOCK - 1) / BLOCK;
    for (uint64_t block = 0; block < num_blocks; block++) {
        uint64_t first = block * BLOCK, count = num_elements - first < BLOCK ? num_elements - first : BLOCK;
        Entry entry;
        memcpy(&entry, patch + sizeof(Header) + block * sizeof entry, sizeof entry);
        const unsigned char *record = patch + (uint64_t)entry.offset * 4;
        int failed = 0;
        if (entry.changes == DENSE) failed = apply_dense(rows, first * width, record, count * width);
        else if (entry.changes) failed = apply_record(width, rows, first, record, &entry);
        if (failed) return -1;
    }
    return 0;
}

static const uint64_t *column(PyObject *object, Py_buffer *view, uint64_t *num_rows) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) return NULL;
    if (view->itemsize != 8 || view->ndim != 1) {
        PyBuffer_Release(view);
        PyErr_SetString(PyExc_TypeError, "expected a one-dimensional column of 8-byte integers");
        return NULL;
    }
    *num_rows = (uint64_t)view->len / 8;
    return (const uint64_t *)view->buf;
}

/* apply(patch, width, elements, begin, address, length) -> whether every change had a row; the patch must be checked */
static PyObject *codec_apply(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long patch, num_elements;
    unsigned int width;
    PyObject *objects[3];
    Py_buffer views[3];
    const uint64_t *columns[3];
    uint64_t num_rows[3];
    if (!PyArg_ParseTuple(args, "KIKOOO:apply", &patch, &width, &num_elements, &objects[0], &objects[1], &objects[2])) return NULL;
    for (int i = 0; i < 3; i++) {
        columns[i] = column(objects[i], &views[i], &num_rows[i]);
        if (!columns[i]) {
            while (i-- > 0) PyBuffer_Release(&views[i]);
            return NULL;
        }
    }
    int failed = num_rows[0] != num_rows[1] || num_rows[0] != num_rows[2];
    if (!failed) {
        Rows rows = {columns[0], columns[1], columns[2], num_rows[0], 0};
        const unsigned char *from = (const unsigned char *)(uintptr_t)patch;
        Py_BEGIN_ALLOW_THREADS
        if (width == 1) failed = apply(1, from, num_elements, &rows);
        else if (width == 2) failed = apply(2, from, num_elements, &rows);
        else failed = apply(4, from, num_elements, &rows);
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; i < 3; i++) PyBuffer_Release(&views[i]);
    return PyBool_FromLong(!failed);
}

static PyMethodDef methods[] = {
    {"encode", codec_encode, METH_VARARGS, "encode(new, base, width, elements, out, capacity) -> bytes, 0 if they do not fit"},
    {"check", codec_check, METH_VARARGS, "check(patch, bytes, width, elements) -> what is wrong, or None"},
    {"apply", codec_apply, METH_VARARGS, "apply(patch, width, elements, begin, address, length) -> whether every change had a row"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "weft._codec", "Patches and FP8.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__codec(void) { return PyModule_Create(&module); }
