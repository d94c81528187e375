// A part of a JPEG, decoded by libjpeg-turbo without the rest of the image.
//
// The code of a JPEG has no index. Rows above the part are read, but neither
// transformed nor converted; columns next to it are read only, and so are rows
// below it, if damage there is to be found. The pixels are those of a whole
// decoding.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>
#include <jerror.h>  // needs jpeglib.h

// Smooth upsampling of chroma uses a neighbour; with it the part is exact.
#define MARGIN 2

typedef struct {
  struct jpeg_error_mgr base;
  jmp_buf failed;
  int damaged;
  char message[JMSG_LENGTH_MAX];  // a warning, or empty
} Errors;

static void fail(j_common_ptr jpeg) {
  longjmp(((Errors *)jpeg->err)->failed, 1);
}

// Keeps the first damage, or else the first remark. libjpeg also warns of what
// does no harm: odd headers, and bytes without a code before a marker. Between
// scans these mean that codes have ended too early.
static void warn(j_common_ptr jpeg, int level) {
  Errors *errors = (Errors *)jpeg->err;
  int code = errors->base.msg_code, marker = errors->base.msg_parm.i[1];
  int harmless =
      ((j_decompress_ptr)jpeg)->input_scan_number == 0 ||
      code == JWRN_NOT_SEQUENTIAL ||
      (code == JWRN_EXTRANEOUS_DATA && marker >= 0xD0 && marker <= 0xD9);
  if (level >= 0 || errors->damaged || (harmless && *errors->message)) return;
  errors->damaged = !harmless;
  (*errors->base.format_message)(jpeg, errors->message);
}

// Decodes rows y to y + height and columns x to x + width to `out`, uint8
// [height, width, channels]. Returns whether libjpeg can.
static int decode(const unsigned char *data, size_t size, int y, int x,
                  int height, int width, int channels, int to_end,
                  unsigned char *out, Errors *errors) {
  struct jpeg_decompress_struct jpeg;
  memset(errors, 0, sizeof *errors);
  jpeg.err = jpeg_std_error(&errors->base);
  errors->base.error_exit = fail;
  errors->base.emit_message = warn;
  if (setjmp(errors->failed)) {
    jpeg_destroy_decompress(&jpeg);
    return 0;
  }
  jpeg_create_decompress(&jpeg);
  jpeg_mem_src(&jpeg, (unsigned char *)data, size);
  jpeg_read_header(&jpeg, TRUE);
  jpeg.out_color_space = channels == 3 ? JCS_RGB : JCS_GRAYSCALE;
  jpeg.do_block_smoothing = FALSE;  // of missing scans, over several blocks
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
  if (to_end) {  // libjpeg would not read the rows of a skip up to the end
    JDIMENSION below = jpeg.output_height - jpeg.output_scanline;
    if (below > 1) jpeg_skip_scanlines(&jpeg, below - 1);
    if (below > 0) jpeg_read_scanlines(&jpeg, row, 1);
    jpeg_finish_decompress(&jpeg);
  }
  jpeg_destroy_decompress(&jpeg);
  return 1;
}

static PyObject *py_decode(PyObject *module, PyObject *args) {
  Py_buffer data, out;
  int y, x, height, width, channels, to_end, done;
  Errors errors;
  (void)module;
  if (!PyArg_ParseTuple(args, "y*(iiii)ipw*", &data, &y, &x, &height,
                        &width, &channels, &to_end, &out))
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
  done = decode(data.buf, data.len, y, x, height, width, channels, to_end,
                out.buf, &errors);
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&data);
  PyBuffer_Release(&out);
  if (!errors.damaged)
    return Py_BuildValue("z", done ? errors.message : NULL);
  PyErr_SetString(PyExc_ValueError, errors.message);
  return NULL;
}

static PyMethodDef methods[] = {
    {"decode", py_decode, METH_VARARGS,
     "decode(data, (y, x, height, width), channels, to_end, out)\n"
     "\n"
     "Decode a part of a JPEG to `out`, uint8 [height, width, channels]. Return\n"
     "the remark of libjpeg-turbo on the file, usually '', or None if it cannot\n"
     "decode it. Raise ValueError for damage; to_end: also below the part."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_jpeg", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jpeg(void) { return PyModule_Create(&definition); }
