// A part of a JPEG, decoded by libjpeg-turbo without the rest of the image.
//
// The code of a JPEG has no index. Rows above the part are read, but neither
// transformed nor converted; rows below it are not read; columns next to it are
// read only. The pixels are those of a whole decoding.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <setjmp.h>
#include <stdio.h>
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

// Decodes rows y to y + height and columns x to x + width to `out`, uint8
// [height, width, channels]. Returns 0 if the file has no damage.
static int decode(const unsigned char *data, size_t size, int y, int x,
                  int height, int width, int channels, unsigned char *out) {
  struct jpeg_decompress_struct jpeg;
  Errors errors;
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
  jpeg_start_decompress(&jpeg);
  if (jpeg.output_components != channels ||
      x + width > (int)jpeg.output_width ||
      y + height > (int)jpeg.output_height)
    fail((j_common_ptr)&jpeg);

  JDIMENSION first = x > MARGIN ? x - MARGIN : 0;
  JDIMENSION columns = x + width + MARGIN;
  if (columns > jpeg.output_width) columns = jpeg.output_width;
  columns -= first;
  // Moves `first` to the left, to the start of a block.
  if (columns < jpeg.output_width) jpeg_crop_scanline(&jpeg, &first, &columns);
  JSAMPARRAY row = (*jpeg.mem->alloc_sarray)(
      (j_common_ptr)&jpeg, JPOOL_IMAGE, columns * channels, 1);
  size_t start = (size_t)(x - (int)first) * channels;
  size_t length = (size_t)width * channels;
  if (y > 0) jpeg_skip_scanlines(&jpeg, y);
  for (int i = 0; i < height; i++, out += length) {
    if (jpeg_read_scanlines(&jpeg, row, 1) != 1) fail((j_common_ptr)&jpeg);
    memcpy(out, row[0] + start, length);
  }
  int damaged = errors.base.num_warnings != 0;
  jpeg_destroy_decompress(&jpeg);
  return damaged;
}

static PyObject *py_decode(PyObject *module, PyObject *args) {
  Py_buffer data, out;
  int y, x, height, width, channels, damaged;
  (void)module;
  if (!PyArg_ParseTuple(args, "y*(iiii)iw*", &data, &y, &x, &height, &width,
                        &channels, &out))
    return NULL;
  if (y < 0 || x < 0 || height < 1 || width < 1 ||
      (channels != 1 && channels != 3) ||
      out.len != (Py_ssize_t)height * width * channels) {
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    PyErr_SetString(PyExc_ValueError, "the array is not of the box's size");
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS
  damaged = decode(data.buf, data.len, y, x, height, width, channels, out.buf);
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&data);
  PyBuffer_Release(&out);
  return PyBool_FromLong(!damaged);
}

static PyMethodDef methods[] = {
    {"decode_part", py_decode, METH_VARARGS,
     "decode_part(data, (y, x, height, width), channels, out) -> bool\n"
     "\n"
     "Decode a part of a JPEG to `out`, uint8 [height, width, channels]. Return\n"
     "False if the file is damaged or libjpeg-turbo cannot decode it."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_jpeg", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jpeg(void) { return PyModule_Create(&definition); }
