/* What happens to bytes in transit: patches between two images of the same weights, and FP8.
 *
 * Callers: weft/codec/, which describes the formats and has a slower NumPy fallback for machines without this module.
 * Addresses are not checked here; patches, which come from other members, are. The interpreter lock is released.
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

static uint64_t padded(uint64_t size) { return (size + 3) & ~UINT64_C(3); }

static uint64_t record_bytes(uint32_t width, uint64_t elements, uint32_t changes, uint32_t escapes) {
    if (changes == 0) return 0;
    if (changes == DENSE) return padded(elements * width);
    return padded(GROUPS + (uint64_t)changes * (1 + (width == 4 ? 4 : 1)) + 2 * (uint64_t)escapes);
}

/* Which of 64 elements differ, one bit each. Sixteen at a time become bytes of ones where they are equal; the instructions
 * that make bits of them have no common name. */
#if defined(__aarch64__)
#include <arm_neon.h>
typedef uint8x16_t Equal;
static inline Equal equal16(uint32_t width, const unsigned char *now, const unsigned char *old) {
    if (width == 1) return vceqq_u8(vld1q_u8(now), vld1q_u8(old));
    if (width == 2) {
        uint16x8_t low = vceqq_u16(vreinterpretq_u16_u8(vld1q_u8(now)), vreinterpretq_u16_u8(vld1q_u8(old)));
        uint16x8_t high = vceqq_u16(vreinterpretq_u16_u8(vld1q_u8(now + 16)), vreinterpretq_u16_u8(vld1q_u8(old + 16)));
        return vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
    }
    uint16x8_t half[2];
    for (int i = 0; i < 2; i++, now += 32, old += 32) {
        uint32x4_t low = vceqq_u32(vreinterpretq_u32_u8(vld1q_u8(now)), vreinterpretq_u32_u8(vld1q_u8(old)));
        uint32x4_t high = vceqq_u32(vreinterpretq_u32_u8(vld1q_u8(now + 16)), vreinterpretq_u32_u8(vld1q_u8(old + 16)));
        half[i] = vuzp1q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high));
    }
    return vuzp1q_u8(vreinterpretq_u8_u16(half[0]), vreinterpretq_u8_u16(half[1]));
}

static inline uint64_t bits64(Equal a, Equal b, Equal c, Equal d) {
    const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t low = vpaddq_u8(vandq_u8(a, bit), vandq_u8(b, bit)), high = vpaddq_u8(vandq_u8(c, bit), vandq_u8(d, bit));
    uint8x16_t sum = vpaddq_u8(low, high);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sum, sum)), 0);
}
#elif defined(__SSE2__)
#include <emmintrin.h>
typedef __m128i Equal;
static inline __m128i at16(const unsigned char *src) { return _mm_loadu_si128((const __m128i *)src); }
static inline Equal equal16(uint32_t width, const unsigned char *now, const unsigned char *old) {
    if (width == 1) return _mm_cmpeq_epi8(at16(now), at16(old));
    if (width == 2) return _mm_packs_epi16(_mm_cmpeq_epi16(at16(now), at16(old)), _mm_cmpeq_epi16(at16(now + 16), at16(old + 16)));
    __m128i low = _mm_packs_epi32(_mm_cmpeq_epi32(at16(now), at16(old)), _mm_cmpeq_epi32(at16(now + 16), at16(old + 16)));
    __m128i high = _mm_packs_epi32(_mm_cmpeq_epi32(at16(now + 32), at16(old + 32)), _mm_cmpeq_epi32(at16(now + 48), at16(old + 48)));
    return _mm_packs_epi16(low, high);
}

static inline uint64_t bits64(Equal a, Equal b, Equal c, Equal d) {
    uint64_t low = (uint32_t)_mm_movemask_epi8(a) | (uint64_t)(uint32_t)_mm_movemask_epi8(b) << 16;
    return low | ((uint32_t)_mm_movemask_epi8(c) | (uint64_t)(uint32_t)_mm_movemask_epi8(d) << 16) << 32;
}
#else
typedef uint64_t Equal;
static inline Equal equal16(uint32_t width, const unsigned char *now, const unsigned char *old) {
    Equal equal = 0;
    for (uint32_t i = 0; i < 16; i++) equal |= (Equal)(memcmp(now + i * width, old + i * width, width) == 0) << i;
    return equal;
}

static inline uint64_t bits64(Equal a, Equal b, Equal c, Equal d) { return a | b << 16 | c << 32 | d << 48; }
#endif

static inline __attribute__((always_inline)) uint64_t changed64(uint32_t width, const unsigned char *now, const unsigned char *old) {
    uint32_t step = 16 * width;
    return ~bits64(equal16(width, now, old), equal16(width, now + step, old + step), equal16(width, now + 2 * step, old + 2 * step), equal16(width, now + 3 * step, old + 3 * step));
}

static uint64_t changed_few(uint32_t width, const unsigned char *now, const unsigned char *old, uint64_t count) {
    uint64_t changed = 0;
    for (uint64_t i = 0; i < count; i++) changed |= (uint64_t)(memcmp(now + i * width, old + i * width, width) != 0) << i;
    return changed;
}

/* What differs in one block. */
typedef struct {
    unsigned char counts[GROUPS];
    uint16_t index[BLOCK + 8]; /* with room for four written in advance */
    uint32_t changes;
    int is_full; /* a group has changed as a whole */
} Found;

/* Two passes without branches that depend on the data, which would cost more than reading the memory. */
static inline __attribute__((always_inline)) void find_changes(Found *found, uint32_t width, const unsigned char *now, const unsigned char *old, uint64_t elements) {
    uint32_t changes = 0;
    found->is_full = 0;
    memset(found->counts, 0, sizeof found->counts);
    for (uint64_t first = 0; first < elements; first += 64) {
        const unsigned char *a = now + first * width, *b = old + first * width;
        uint64_t changed = elements - first >= 64 ? changed64(width, a, b) : changed_few(width, a, b, elements - first);
        uint32_t count = (uint32_t)__builtin_popcountll(changed);
        uint32_t group = (uint32_t)(first / GROUP), sum = found->counts[group] + count;
        found->is_full |= sum == GROUP;
        found->counts[group] = (unsigned char)sum;
        uint16_t *index = found->index + changes;
        for (uint32_t i = 0; i < 4; i++) { /* usually enough; excess writes are overwritten */
            index[i] = (uint16_t)(first + (uint32_t)__builtin_ctzll(changed | UINT64_C(1) << 63));
            changed &= changed - 1;
        }
        for (uint32_t i = 4; i < count; i++) {
            index[i] = (uint16_t)(first + (uint32_t)__builtin_ctzll(changed));
            changed &= changed - 1;
        }
        changes += count;
    }
    found->changes = changes;
}

/* Places and values of what differs, into a record; returns the escapes. */
static inline __attribute__((always_inline)) uint32_t write_changes(const Found *found, uint32_t width, const unsigned char *now, const unsigned char *old, unsigned char *places, uint16_t *wide) {
    unsigned char *values = places + found->changes;
    uint32_t escapes = 0;
    for (uint32_t i = 0; i < found->changes; i++) {
        uint32_t at = found->index[i] * width;
        places[i] = (unsigned char)found->index[i];
        if (width == 1) {
            values[i] = now[at];
        } else if (width == 4) {
            memcpy(values + 4 * i, now + at, 4);
        } else {
            uint16_t bits, before;
            memcpy(&bits, now + at, 2), memcpy(&before, old + at, 2);
            int32_t difference = (int16_t)(uint16_t)(bits - before);
            uint32_t narrow = (uint32_t)(difference + 127) <= 254;
            values[i] = narrow ? (unsigned char)difference : ESCAPE;
            wide[escapes] = bits;
            escapes += !narrow;
        }
    }
    return escapes;
}

static unsigned char *write_dense(uint32_t width, const unsigned char *now, uint64_t elements, Entry *entry, unsigned char *record, const unsigned char *end) {
    uint64_t size = record_bytes(width, elements, DENSE, 0);
    if (size > (uint64_t)(end - record)) return NULL;
    *entry = (Entry){0, DENSE, 0};
    memset(record + size - 4, 0, 4);
    memcpy(record, now, (size_t)(elements * width));
    return record + size;
}

/* One block; returns where the next record begins, or NULL if it does not fit. */
static inline __attribute__((always_inline)) unsigned char *encode_block(uint32_t width, const unsigned char *now, const unsigned char *old, uint64_t elements, Entry *entry, unsigned char *record, const unsigned char *end) {
    Found found;
    uint16_t wide[BLOCK + 1];
    if (!old) return write_dense(width, now, elements, entry, record, end); /* an anchor */
    find_changes(&found, width, now, old, elements);
    *entry = (Entry){0, (uint16_t)found.changes, 0};
    if (found.changes == 0) return record;
    uint64_t least = record_bytes(width, elements, found.changes, 0);
    if (found.is_full || least >= padded(elements * width)) return write_dense(width, now, elements, entry, record, end);
    if (least > (uint64_t)(end - record)) return NULL;
    uint32_t escapes = write_changes(&found, width, now, old, record + GROUPS, wide);
    uint64_t size = record_bytes(width, elements, found.changes, escapes);
    if (size >= padded(elements * width)) return write_dense(width, now, elements, entry, record, end);
    if (size > (uint64_t)(end - record)) return NULL;
    entry->escapes = (uint16_t)escapes;
    uint64_t sparse = GROUPS + (uint64_t)found.changes * (width == 4 ? 5 : 2);
    memcpy(record, found.counts, GROUPS);
    memcpy(record + sparse, wide, (size_t)2 * escapes);
    memset(record + sparse + 2 * escapes, 0, (size_t)(size - sparse - 2 * escapes));
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

/* The address of a byte of the image, and how many bytes follow it in the same row. Bytes are requested in ascending order. */
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

/* Where the changed elements of a block are; all are fetched at once, or each would wait for the memory on its own. */
static inline __attribute__((always_inline)) int find_elements(uint32_t width, Rows *rows, uint64_t first, const unsigned char *record, uint32_t left_changes, unsigned char **elements) {
    const unsigned char *place = record + GROUPS;
    unsigned char *into = NULL;
    uint64_t from = 0, left = 0; /* the row at hand: `left` bytes from image byte `from` on are at `into` */
    for (uint32_t group = 0; group < GROUPS; group++) {
        uint32_t count = record[group];
        if (count > left_changes) return -1;
        left_changes -= count;
        for (uint32_t i = 0; i < count; i++) {
            uint64_t byte = (first + group * GROUP + *place++) * width;
            if (byte - from >= left) {
                into = find(rows, byte, &left);
                if (!into || left < width) return -1;
                from = byte;
            }
            *elements = into + (byte - from);
            __builtin_prefetch(*elements++, 1);
        }
    }
    return left_changes ? -1 : 0;
}

static inline __attribute__((always_inline)) int apply_record(uint32_t width, Rows *rows, uint64_t first, const unsigned char *record, const Entry *entry) {
    unsigned char *elements[BLOCK];
    const unsigned char *value = record + GROUPS + entry->changes, *wide = value + entry->changes, *end = wide + 2 * entry->escapes;
    if (find_elements(width, rows, first, record, entry->changes, elements) < 0) return -1;
    for (uint32_t i = 0; i < entry->changes; i++) {
        if (width == 1) {
            *elements[i] = value[i];
        } else if (width == 4) {
            memcpy(elements[i], value + 4 * i, 4);
        } else {
            uint16_t bits;
            memcpy(&bits, elements[i], 2);
            bits = (uint16_t)(bits + (int8_t)value[i]);
            if (value[i] == ESCAPE) {
                if (wide == end) return -1;
                memcpy(&bits, wide, 2), wide += 2;
            }
            memcpy(elements[i], &bits, 2);
        }
    }
    return 0;
}

/* Bounds are checked again: a patch may lie in memory that others can write. */
static inline __attribute__((always_inline)) int apply(uint32_t width, const unsigned char *patch, uint64_t size, uint64_t num_elements, Rows *rows) {
    uint64_t num_blocks = (num_elements + BLOCK - 1) / BLOCK;
    if (size < sizeof(Header) + num_blocks * sizeof(Entry)) return -1;
    for (uint64_t block = 0; block < num_blocks; block++) {
        uint64_t first = block * BLOCK, count = num_elements - first < BLOCK ? num_elements - first : BLOCK;
        Entry entry;
        memcpy(&entry, patch + sizeof(Header) + block * sizeof entry, sizeof entry);
        uint64_t at = (uint64_t)entry.offset * 4, bytes = record_bytes(width, count, entry.changes, entry.escapes);
        const unsigned char *record = patch + at;
        if (bytes && (at > size || bytes > size - at || (entry.changes != DENSE && entry.changes > BLOCK))) return -1;
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

/* apply(patch, bytes, width, elements, begin, address, length) -> whether every change had a row; the patch must be checked */
static PyObject *codec_apply(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long patch, size, num_elements;
    unsigned int width;
    PyObject *objects[3];
    Py_buffer views[3];
    const uint64_t *columns[3];
    uint64_t num_rows[3];
    if (!PyArg_ParseTuple(args, "KKIKOOO:apply", &patch, &size, &width, &num_elements, &objects[0], &objects[1], &objects[2])) return NULL;
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
        if (width == 1) failed = apply(1, from, size, num_elements, &rows);
        else if (width == 2) failed = apply(2, from, size, num_elements, &rows);
        else failed = apply(4, from, size, num_elements, &rows);
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; i < 3; i++) PyBuffer_Release(&views[i]);
    return PyBool_FromLong(!failed);
}

/* FP8 e4m3. A box of a matrix whose elements are BF16 (width 2) or FP32 (width 4), in blocks that share a scale. */
typedef struct {
    const unsigned char *src;
    uint64_t src_stride; /* bytes from row to row */
    uint64_t rows, columns;
    uint32_t width;
    uint64_t first_row, first_column; /* of the box in the matrix */
    uint64_t block_rows, block_columns, grid_columns;
    float *grid; /* one number for each block of the matrix */
} Box;

/* Plain loops without branches: compilers make vectors of them. BF16 is the upper half of an FP32. */
typedef union {
    uint32_t bits;
    float number;
} Single;

#define MAGNITUDE 0x7FFFFFFFu
#define INFINITE 0x7F800000u
#define TOP 0x43E00000u /* 448 */

static inline __attribute__((always_inline)) uint32_t bits_at(uint32_t width, const void *src, uint64_t i) {
    return width == 2 ? (uint32_t)((const uint16_t *)src)[i] << 16 : ((const uint32_t *)src)[i];
}

/* The largest magnitude among finite numbers, as bits, which order like the numbers; *wild counts the others. */
static inline __attribute__((always_inline)) uint32_t largest(uint32_t width, const void *src, uint64_t count, uint64_t *wild) {
    uint32_t most = 0, finite = 0;
    uint16_t half = 0;
    if (width == 2) { /* twice as many at a time */
        for (uint64_t i = 0; i < count; i++) {
            uint16_t magnitude = ((const uint16_t *)src)[i] & 0x7FFF;
            half = magnitude > half ? magnitude : half;
        }
        most = (uint32_t)half << 16;
    } else {
        for (uint64_t i = 0; i < count; i++) {
            uint32_t magnitude = ((const uint32_t *)src)[i] & MAGNITUDE;
            most = magnitude > most ? magnitude : most;
        }
    }
    if (most < INFINITE) return most;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t magnitude = bits_at(width, src, i) & MAGNITUDE;
        if (magnitude >= INFINITE) (*wild)++;
        else if (magnitude > finite) finite = magnitude;
    }
    return finite;
}

/* Scaled, kept inside ±448, as e4m3: to nearest, ties to even. Below 2^-6 the last place of e4m3 is 2^-9, which is that of
 * a float near 2^14: adding 2^14 rounds to it. */
static inline __attribute__((always_inline)) void quantize_run(uint32_t width, uint8_t *restrict dst, const void *restrict src, uint64_t count, float factor) {
    for (uint64_t i = 0; i < count; i++) {
        Single value = {bits_at(width, src, i)}, small;
        value.number *= factor;
        uint32_t magnitude = value.bits & MAGNITUDE, not_a_number = magnitude > INFINITE ? 0x7F : 0;
        magnitude = magnitude < TOP ? magnitude : TOP; /* in integers: NaN needs no special case */
        small.bits = magnitude;
        small.number += 16384.0f;
        uint32_t large = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120u << 23)) >> 20;
        uint32_t code = magnitude < 0x3C800000 ? small.bits & 0xFF : large;
        dst[i] = (uint8_t)(code | not_a_number | (value.bits >> 24 & 0x80));
    }
}

/* The same for finite numbers that stay inside ±448. Adding 2^20 times a number's power of two, or that of the smallest
 * normal number, leaves its four leading bits in the last places, rounded: the code is those and the exponent. */
static inline __attribute__((always_inline)) void quantize_bounded(uint32_t width, uint8_t *restrict dst, const void *restrict src, uint64_t count, float factor) {
    for (uint64_t i = 0; i < count; i++) {
        Single value = {bits_at(width, src, i)}, magnitude, power, sum;
        value.number *= factor;
        magnitude.bits = value.bits & MAGNITUDE;
        uint32_t exponent = value.bits & INFINITE;
        exponent = exponent > (121u << 23) ? exponent : 121u << 23;
        power.bits = exponent + (20u << 23);
        sum.number = magnitude.number + power.number;
        dst[i] = (uint8_t)((sum.bits - power.bits + (exponent >> 20) - 121u * 8) | (value.bits >> 24 & 0x80));
    }
}

/* Calls for every run of a row that lies in one block: `grid` points to the block's number. */
#define FOR_RUNS(box, row, column, count, number)                                                                                     \
    for (uint64_t row = 0; row < (box)->rows; row++)                                                                                  \
        for (uint64_t column = 0, count = 0; column < (box)->columns; column += count)                                                \
            for (float *number = (count = block_left(box, column), block_of(box, row, column)); number; number = NULL)

static inline uint64_t block_left(const Box *box, uint64_t column) {
    uint64_t left = box->block_columns - (box->first_column + column) % box->block_columns;
    return left < box->columns - column ? left : box->columns - column;
}

static inline float *block_of(const Box *box, uint64_t row, uint64_t column) {
    return box->grid + (box->first_row + row) / box->block_rows * box->grid_columns + (box->first_column + column) / box->block_columns;
}

static inline __attribute__((always_inline)) uint64_t amax(uint32_t width, const Box *box) {
    uint64_t wild = 0;
    FOR_RUNS(box, row, column, count, number) {
        uint32_t bits = largest(width, box->src + row * box->src_stride + column * width, count, &wild), before;
        memcpy(&before, number, 4);
        if (bits > before) memcpy(number, &bits, 4);
    }
    return wild;
}

static inline __attribute__((always_inline)) void quantize(uint32_t width, const Box *box, uint8_t *dst, uint64_t dst_stride, int bounded) {
    FOR_RUNS(box, row, column, count, number) {
        uint8_t *to = dst + row * dst_stride + column;
        const void *from = box->src + row * box->src_stride + column * width;
        if (bounded) quantize_bounded(width, to, from, count, *number);
        else quantize_run(width, to, from, count, *number);
    }
}

/* Tables of 8-byte integers: a row of numbers for each box, so that thousands of small matrices are one call. */
#define BOX_NUMBERS 11 /* as in Box */
#define QUANTIZED_NUMBERS 13 /* a box, where its codes begin, and bytes from row to row of them */
#define CAST_NUMBERS 7 /* source, its stride, where the result begins, its stride, rows, columns, width of the source */

static const uint64_t *table(PyObject *object, Py_buffer *view, Py_ssize_t width) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) return NULL;
    if (view->itemsize != 8 || view->ndim != 2 || view->shape[1] != width) {
        PyBuffer_Release(view);
        PyErr_Format(PyExc_TypeError, "expected a table of 8-byte integers with %zd columns", width);
        return NULL;
    }
    return (const uint64_t *)view->buf;
}

static Box box_at(const uint64_t *numbers) {
    return (Box){(const unsigned char *)(uintptr_t)numbers[0], numbers[1], numbers[2], numbers[3], (uint32_t)numbers[4], numbers[5], numbers[6], numbers[7], numbers[8], numbers[9], (float *)(uintptr_t)numbers[10]};
}

/* A table of boxes whose numbers make sense, or NULL. */
static const uint64_t *box_table(PyObject *object, Py_buffer *view, Py_ssize_t width) {
    const uint64_t *rows = table(object, view, width);
    if (!rows) return NULL;
    for (Py_ssize_t i = 0; i < view->shape[0]; i++) {
        const uint64_t *numbers = rows + i * width;
        if ((numbers[4] == 2 || numbers[4] == 4) && numbers[7] && numbers[8]) continue;
        PyBuffer_Release(view);
        PyErr_SetString(PyExc_ValueError, "expected elements of 2 or 4 bytes, and blocks");
        return NULL;
    }
    return rows;
}

/* amax(boxes, wild): raises the numbers of all boxes to the largest magnitude of each block; wild[i] counts the elements of
 * box i that are not finite */
static PyObject *codec_amax(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *boxes, *counts;
    Py_buffer view, counted;
    if (!PyArg_ParseTuple(args, "OO:amax", &boxes, &counts)) return NULL;
    const uint64_t *rows = box_table(boxes, &view, BOX_NUMBERS);
    if (!rows) return NULL;
    if (PyObject_GetBuffer(counts, &counted, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&view);
        return NULL;
    }
    Py_ssize_t count = view.shape[0];
    int fits = counted.len == 8 * count;
    uint64_t *wild = (uint64_t *)counted.buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; fits && i < count; i++) {
        Box box = box_at(rows + i * BOX_NUMBERS);
        wild[i] = box.width == 2 ? amax(2, &box) : amax(4, &box);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    PyBuffer_Release(&counted);
    if (!fits) {
        PyErr_SetString(PyExc_TypeError, "expected a count for each box");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* quantize(boxes, dst, bounded): the numbers of boxes are the factors of their blocks; places of codes are relative to `dst` */
static PyObject *codec_quantize(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *boxes;
    Py_buffer view;
    unsigned long long dst;
    int bounded;
    if (!PyArg_ParseTuple(args, "OKp:quantize", &boxes, &dst, &bounded)) return NULL;
    const uint64_t *rows = box_table(boxes, &view, QUANTIZED_NUMBERS);
    if (!rows) return NULL;
    Py_ssize_t count = view.shape[0];
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint64_t *numbers = rows + i * QUANTIZED_NUMBERS;
        Box box = box_at(numbers);
        uint8_t *to = (uint8_t *)(uintptr_t)(dst + numbers[BOX_NUMBERS]);
        if (box.width == 2) quantize(2, &box, to, numbers[BOX_NUMBERS + 1], bounded);
        else quantize(4, &box, to, numbers[BOX_NUMBERS + 1], bounded);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

/* BF16 to FP32 is exact; FP32 to BF16 rounds to nearest, ties to even, and NaN stays NaN. */
static void to_bf16(uint16_t *restrict dst, const uint32_t *restrict src, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = src[i], nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16, nan = (bits >> 16) | 0x40u;
        dst[i] = (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : nearest);
    }
}

static void to_fp32(uint32_t *restrict dst, const uint16_t *restrict src, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) dst[i] = (uint32_t)src[i] << 16;
}

/* cast(matrices, dst): places of results are relative to `dst` */
static PyObject *codec_cast(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *matrices;
    Py_buffer view;
    unsigned long long dst;
    if (!PyArg_ParseTuple(args, "OK:cast", &matrices, &dst)) return NULL;
    const uint64_t *rows = table(matrices, &view, CAST_NUMBERS);
    if (!rows) return NULL;
    Py_ssize_t count = view.shape[0];
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint64_t *numbers = rows + i * CAST_NUMBERS;
        for (uint64_t row = 0; row < numbers[4]; row++) {
            void *to = (void *)(uintptr_t)(dst + numbers[2] + row * numbers[3]);
            const void *from = (const void *)(uintptr_t)(numbers[0] + row * numbers[1]);
            if (numbers[6] == 4) to_bf16(to, from, numbers[5]);
            else to_fp32(to, from, numbers[5]);
        }
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"cast", codec_cast, METH_VARARGS, "cast(matrices, dst): BF16 (width 2) to FP32, or back (4)"},
    {"amax", codec_amax, METH_VARARGS, "amax(boxes, wild): the largest magnitudes of blocks, and how many numbers are not finite"},
    {"quantize", codec_quantize, METH_VARARGS, "quantize(boxes, dst, bounded)"},
    {"encode", codec_encode, METH_VARARGS, "encode(new, base, width, elements, out, capacity) -> bytes, 0 if they do not fit"},
    {"check", codec_check, METH_VARARGS, "check(patch, bytes, width, elements) -> what is wrong, or None"},
    {"apply", codec_apply, METH_VARARGS, "apply(patch, bytes, width, elements, begin, address, length) -> whether every change had a row"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "weft._codec", "Patches and FP8.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__codec(void) { return PyModule_Create(&module); }
