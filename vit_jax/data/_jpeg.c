// A part of a JPEG, decoded by libjpeg-turbo without the rest of the image.
//
// Rows above the part are read, because the code has no index, but neither
// transformed nor converted; rows below are not read; columns beside it are
// read only. The pixels are those of a full decoding.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <setjmp.h>

#if __has_include(<jpegint.h>)
#include "_huffman.h"
#else  // Many systems do not install it: libjpeg-turbo decodes all by itself.
#include <stdio.h>
#include <jpeglib.h>
typedef char Scan;
#define use_own_decoder(jpeg, scan, left, width) ((void)(scan))
#endif

// Smooth upsampling of chroma uses a neighbour; with it the part is exact.
#define MARGIN 2
// Columns that are decoded besides those of the part: those of its first MCU.
#define MORE_COLUMNS (2 * MARGIN + 4 * DCTSIZE)

typedef struct {
  struct jpeg_error_mgr base;
  jmp_buf failed;
} Errors;

static void fail(j_common_ptr jpeg) {
  longjmp(((Errors *)jpeg->err)->failed, 1);
}

static void ignore(j_common_ptr jpeg) { (void)jpeg; }

// Decodes rows y to y + height and columns x to x + width, in pixels of the
// image divided by `denominator`, and sets `stride` to the columns of a row of
// `out` and `left` to the first column of the part. Returns 0 if all is well.
static int decode(const unsigned char *data, size_t size, int y, int x,
                  int height, int width, int channels, int denominator,
                  unsigned char *out, int *left, int *stride) {
  struct jpeg_decompress_struct jpeg;
  Errors errors;
  Scan scan;
  jpeg.err = jpeg_std_error(&errors.base);
  errors.base.error_exit = fail;
  errors.base.output_message = ignore;
  if (setjmp(errors.failed)) {
    jpeg_destroy_decompress(&jpeg);
    return 1;
  }
  jpeg_create_decompress(&jpeg);
  jpeg_mem_src(&jpeg, (unsigned char *)data, size);
  jpeg_read_header(&jpeg, TRUE);
  jpeg.out_color_space = channels == 3 ? JCS_RGB : JCS_GRAYSCALE;
  jpeg.scale_num = 1;
  jpeg.scale_denom = denominator;
  jpeg_start_decompress(&jpeg);
  if (jpeg.output_components != channels ||
      x + width > (int)jpeg.output_width ||
      y + height > (int)jpeg.output_height)
    fail((j_common_ptr)&jpeg);

  JDIMENSION first = x > MARGIN ? x - MARGIN : 0;
  JDIMENSION columns = x + width + MARGIN;
  if (columns > jpeg.output_width) columns = jpeg.output_width;
  columns -= first;
  if (columns < jpeg.output_width) jpeg_crop_scanline(&jpeg, &first, &columns);
  *left = x - (int)first;
  *stride = (int)columns;
  if (columns > (JDIMENSION)(width + MORE_COLUMNS)) fail((j_common_ptr)&jpeg);
  use_own_decoder(&jpeg, &scan, first, columns);
  if (y > 0) jpeg_skip_scanlines(&jpeg, y);
  for (int i = 0; i < height; i++) {
    JSAMPROW row = out + (size_t)i * columns * channels;
    if (jpeg_read_scanlines(&jpeg, &row, 1) != 1) fail((j_common_ptr)&jpeg);
  }
  int damaged = errors.base.num_warnings != 0;
  jpeg_destroy_decompress(&jpeg);
  return damaged;
}

static PyObject *py_decode(PyObject *module, PyObject *args) {
  Py_buffer data, out;
  int y, x, height, width, channels, denominator, damaged, left, stride;
  (void)module;
  if (!PyArg_ParseTuple(args, "y*(iiii)iiw*", &data, &y, &x, &height, &width,
                        &channels, &denominator, &out))
    return NULL;
  if (y < 0 || x < 0 || height < 1 || width < 1 ||
      (channels != 1 && channels != 3) ||
      out.len < (Py_ssize_t)height * (width + MORE_COLUMNS) * channels) {
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    PyErr_SetString(PyExc_ValueError, "the array is too small for the box");
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS
  damaged = decode(data.buf, data.len, y, x, height, width, channels,
                   denominator, out.buf, &left, &stride);
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&data);
  PyBuffer_Release(&out);
  if (damaged) Py_RETURN_NONE;
  return Py_BuildValue("ii", left, stride);
}

static PyMethodDef methods[] = {
    {"decode", py_decode, METH_VARARGS,
     "decode(data, (y, x, height, width), channels, denominator, out) -> tuple\n"
     "\n"
     "Decode a part of a JPEG to the first rows of `out`, uint8 [height, stride,\n"
     "channels] with room for a stride of width + MORE_COLUMNS. Return (left,\n"
     "stride), where `left` is the first column of the part. Return None if the\n"
     "file is damaged or of a kind that libjpeg cannot convert."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_jpeg", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jpeg(void) {
  PyObject *module = PyModule_Create(&definition);
  if (module) PyModule_AddIntMacro(module, MORE_COLUMNS);
  return module;
}
