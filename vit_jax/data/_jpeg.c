// A part of a JPEG, decoded by libjpeg-turbo without the rest of the image.
//
// Rows above the part are read, because the code has no index, but neither
// transformed nor converted; rows below are not read; columns beside it are
// read only. The pixels are those of a full decoding.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <jpeglib.h>

// Smooth upsampling of chroma uses a neighbour; with it the part is exact.
#define MARGIN 2

typedef struct {
  struct jpeg_error_mgr base;
  jmp_buf failed;
} Errors;

static void fail(j_common_ptr jpeg) {
  longjmp(((Errors *)jpeg->err)->failed, 1);
}

static void ignore(j_common_ptr jpeg) { (void)jpeg; }

// Decodes rows y to y + height and columns x to x + width, in pixels of the
// image divided by `denominator`, into `out`. Returns 0 if all is well.
static int decode(const unsigned char *data, size_t size, int y, int x,
                  int height, int width, int channels, int denominator,
                  unsigned char *out) {
  struct jpeg_decompress_struct jpeg;
  Errors errors;
  unsigned char *volatile row = NULL;
  jpeg.err = jpeg_std_error(&errors.base);
  errors.base.error_exit = fail;
  errors.base.output_message = ignore;
  if (setjmp(errors.failed)) {
    jpeg_destroy_decompress(&jpeg);
    free(row);
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

  JDIMENSION left = x > MARGIN ? x - MARGIN : 0;
  JDIMENSION columns = x + width + MARGIN;
  if (columns > jpeg.output_width) columns = jpeg.output_width;
  columns -= left;
  if (columns < jpeg.output_width) jpeg_crop_scanline(&jpeg, &left, &columns);
  row = malloc((size_t)columns * channels);
  if (row == NULL) fail((j_common_ptr)&jpeg);
  if (y > 0) jpeg_skip_scanlines(&jpeg, y);
  for (int i = 0; i < height; i++) {
    JSAMPROW rows[1] = {row};
    if (jpeg_read_scanlines(&jpeg, rows, 1) != 1) fail((j_common_ptr)&jpeg);
    memcpy(out, row + (size_t)(x - left) * channels, (size_t)width * channels);
    out += (size_t)width * channels;
  }
  int damaged = errors.base.num_warnings != 0;
  jpeg_destroy_decompress(&jpeg);
  free(row);
  return damaged;
}

static PyObject *py_decode(PyObject *module, PyObject *args) {
  Py_buffer data, out;
  int y, x, height, width, channels, denominator, status;
  (void)module;
  if (!PyArg_ParseTuple(args, "y*(iiii)iiw*", &data, &y, &x, &height, &width,
                        &channels, &denominator, &out))
    return NULL;
  if (y < 0 || x < 0 || height < 1 || width < 1 ||
      (channels != 1 && channels != 3) ||
      out.len != (Py_ssize_t)height * width * channels) {
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    PyErr_SetString(PyExc_ValueError, "the array has not the size of the box");
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS
  status = decode(data.buf, data.len, y, x, height, width, channels,
                  denominator, out.buf);
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&data);
  PyBuffer_Release(&out);
  return PyBool_FromLong(status == 0);
}

static PyMethodDef methods[] = {
    {"decode", py_decode, METH_VARARGS,
     "decode(data, (y, x, height, width), channels, denominator, out) -> bool\n"
     "\n"
     "Decode a part of a JPEG to `out`, uint8 [height, width, channels].\n"
     "Return False if it is damaged or of a kind that libjpeg cannot convert."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_jpeg", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jpeg(void) { return PyModule_Create(&definition); }
