// Huffman decoding of a baseline JPEG (ITU-T T.81, annex F.2.2), in place of
// libjpeg-turbo's, for decoding a part of an image.
//
// In blocks outside the part, one look-up passes over several coefficients. The
// coefficients are those of libjpeg-turbo; files that violate the standard are
// refused.

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#define JPEG_INTERNALS  // makes jpeglib.h include jpegint.h
#include <jpeglib.h>

enum { LOOK_BITS = 11, PASS_BITS = 12, TABLES = 2 };

// A code of T.81, annex C, and its look-up tables.
typedef struct {
  UINT8 counts[17], symbols[256];  // as in JHUFF_TBL, which it is made from
  // By the next LOOK_BITS bits: an Entry, or 0 for a longer code.
  uint16_t look[1 << LOOK_BITS];
  // By the next PASS_BITS bits: the bits of whole coefficients, their number
  // and that of the zeros before them << 4, and END if the block ends. Or 0.
  uint16_t pass[1 << PASS_BITS];
  uint32_t limits[17];  // codes of n bits, followed by other bits, are below
  int offsets[17];      // of their symbols, less their first code
} Code;

// An Entry is an integer of these fields. The size is 0 for symbols without a
// value: the end of the block, 16 zeros, a difference of 0.
#define LENGTH(entry) ((entry) & 63)     // bits of the code and of the value
#define RUN(entry) ((entry) >> 6 & 15)   // zeros before the coefficient
#define SIZE(entry) ((entry) >> 10 & 15) // bits of the value
#define END (1 << 15)

// The compressed bytes. `bits` begins, from its highest bit on, with `count`
// bits that were read; the last `made_up` of them are zeros after the end.
typedef struct {
  const unsigned char *next, *end;
  uint64_t bits;
  int count, made_up;
} Bits;

typedef struct {
  Bits bits;
  const Code *dc[MAX_COMPS_IN_SCAN], *ac[MAX_COMPS_IN_SCAN];
  unsigned last_dc[MAX_COMPS_IN_SCAN];  // as JCOEF, modulo 2^32
  JDIMENSION column, first_column, last_column;  // of MCUs
} Scan;

// Positions of coefficients in a block, from low to high frequency.
static const unsigned char zigzag[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,
    12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,
    35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
    58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

// Makes at least 32 bits available, if need be with zeros after the end.
static inline void refill(Bits *bits) {
  if (bits->count >= 32) return;
  if (bits->end - bits->next >= 8) {
    uint64_t bytes = 0;
    for (int i = 0; i < 8; i++) bytes = bytes << 8 | bits->next[i];
    // Without a byte of 255, which begins a marker or a stuffed byte.
    uint64_t zero = ~bytes;
    if (!((zero - 0x0101010101010101u) & ~zero & 0x8080808080808080u)) {
      bits->bits |= bytes >> bits->count;
      bits->next += (63 - bits->count) >> 3;
      bits->count |= 56;
      return;
    }
  }
  while (bits->count <= 56) {
    uint64_t byte = 0;
    if (bits->next < bits->end && *bits->next != 255) {
      byte = *bits->next++;
    } else if (bits->end - bits->next >= 2 && bits->next[1] == 0) {
      byte = 255;
      bits->next += 2;
    } else {
      bits->made_up += 8;
    }
    bits->bits |= byte << (56 - bits->count);
    bits->count += 8;
  }
}

static inline uint64_t peek(const Bits *bits, int count) {
  return bits->bits >> (64 - count);
}

static inline void drop(Bits *bits, int count) {
  bits->bits <<= count;
  bits->count -= count;
}

// Returns the Entry of the code that these 16 bits begin with, or 0.
static __attribute__((noinline)) unsigned find_code(const Code *code, uint32_t bits) {
  for (int length = 1; length <= 16; length++)
    if (bits < code->limits[length]) {
      int place = code->offsets[length] + (int)(bits >> (16 - length));
      unsigned symbol = code->symbols[place], size = symbol & 15;
      return length + size + (symbol >> 4 << 6) + (size << 10);
    }
  return 0;
}

static inline int is_end(unsigned entry) {
  return !SIZE(entry) && RUN(entry) != 15;
}

static void make_code(Code *code, const JHUFF_TBL *table) {
  memcpy(code->counts, table->bits, sizeof code->counts);
  memcpy(code->symbols, table->huffval, sizeof code->symbols);
  uint32_t next = 0;
  int place = 0;
  for (int length = 1; length <= 16; length++) {
    code->offsets[length] = place - (int)next;
    next += code->counts[length];
    place += code->counts[length];
    code->limits[length] = next << (16 - length);
    next <<= 1;
  }
  for (uint32_t bits = 0; bits < 1 << LOOK_BITS; bits++) {
    unsigned entry = find_code(code, bits << (16 - LOOK_BITS));
    int is_longer = LENGTH(entry) - SIZE(entry) > LOOK_BITS;
    code->look[bits] = is_longer ? 0 : (uint16_t)entry;
  }
  for (uint32_t bits = 0; bits < 1 << PASS_BITS; bits++) {
    unsigned used = 0, passed = 0;
    while (passed < END >> 4) {
      uint32_t rest = bits << (16 - PASS_BITS + used) & 0xFFFF;
      unsigned entry = find_code(code, rest);
      if (!entry || used + LENGTH(entry) > PASS_BITS) break;
      used += LENGTH(entry);
      passed += is_end(entry) ? END >> 4 : RUN(entry) + 1;
    }
    code->pass[bits] = (uint16_t)(used | passed << 4);
  }
}

// Returns the code of a table, which most files have in common.
static const Code *code_of(const JHUFF_TBL *table, int kind, int number) {
  static _Thread_local Code codes[2][TABLES];
  Code *code = &codes[kind][number];
  if (memcmp(code->counts, table->bits, sizeof code->counts) ||
      memcmp(code->symbols, table->huffval, sizeof code->symbols))
    make_code(code, table);
  return code;
}

static inline unsigned next_entry(Bits *bits, const Code *code) {
  refill(bits);
  unsigned entry = code->look[peek(bits, LOOK_BITS)];
  return entry ? entry : find_code(code, (uint32_t)peek(bits, 16));
}

// Returns the value after a code (T.81, F.2.2.1, EXTEND).
static inline int value_of(const Bits *bits, unsigned entry) {
  int size = SIZE(entry);
  int mask = (1 << size) - 1;
  int value = (int)(bits->bits >> 1 >> (63 - LENGTH(entry))) & mask;
  int is_negative = value >> (size - 1) == 0;
  return value - (-is_negative & mask);
}

// Decodes coefficients 1 to 63. Returns whether they are valid.
static inline int decode_ac(Bits *bits, const Code *code, JCOEF *block) {
  for (unsigned k = 1; k < 64; k++) {
    unsigned entry = next_entry(bits, code);
    k += RUN(entry);
    if (SIZE(entry)) {
      if (k > 63) return 0;
      block[zigzag[k]] = (JCOEF)value_of(bits, entry);
    } else if (RUN(entry) != 15) {
      drop(bits, LENGTH(entry));
      return entry != 0;
    }
    drop(bits, LENGTH(entry));
  }
  return 1;
}

// Passes over coefficients 1 to 63. Returns whether they are valid.
static inline int pass_ac(Bits *bits, const Code *code) {
  for (unsigned k = 1; k < 64;) {
    refill(bits);
    unsigned pass = code->pass[peek(bits, PASS_BITS)];
    unsigned after = k + ((pass & ~END) >> 4);
    if (pass && after < 64) {  // so that all of them are of this block
      drop(bits, pass & 15);
      if (pass & END) return 1;
      k = after;
      continue;
    }
    unsigned entry = next_entry(bits, code);
    drop(bits, LENGTH(entry));
    if (is_end(entry)) return entry != 0;
    k += RUN(entry) + 1;
    if (k > 64) return 0;
  }
  return 1;
}

// Decodes the next MCU; of libjpeg's type. Without `blocks` it is passed over.
static boolean decode_mcu(j_decompress_ptr jpeg, JBLOCKROW *blocks) {
  Scan *scan = jpeg->client_data;
  Bits bits = scan->bits;
  int valid = 1;
  if (scan->column < scan->first_column || scan->column > scan->last_column)
    blocks = NULL;
  for (int i = 0; i < jpeg->blocks_in_MCU; i++) {
    int c = jpeg->MCU_membership[i];
    unsigned entry = next_entry(&bits, scan->dc[c]);
    valid &= entry != 0;
    if (SIZE(entry)) scan->last_dc[c] += (unsigned)value_of(&bits, entry);
    drop(&bits, LENGTH(entry));
    if (blocks && jpeg->cur_comp_info[c]->component_needed) {
      (*blocks[i])[0] = (JCOEF)scan->last_dc[c];
      valid &= decode_ac(&bits, scan->ac[c], *blocks[i]);
    } else {
      valid &= pass_ac(&bits, scan->ac[c]);
    }
  }
  if (!valid || bits.made_up > bits.count)
    jpeg->err->error_exit((j_common_ptr)jpeg);
  scan->bits = bits;
  if (++scan->column == jpeg->MCUs_per_row) scan->column = 0;
  return TRUE;
}

// Lets a decompression that was just started use this decoder for the columns
// `left` to `left + width` of pixels, if the file is of a kind that it decodes.
static void use_own_decoder(j_decompress_ptr jpeg, Scan *scan, JDIMENSION left,
                            JDIMENSION width) {
  if (jpeg->progressive_mode || jpeg->arith_code || jpeg->restart_interval ||
      jpeg->data_precision != 8 || jpeg->comps_in_scan != jpeg->num_components)
    return;
  memset(scan, 0, sizeof *scan);
  for (int c = 0; c < jpeg->comps_in_scan; c++) {
    int dc = jpeg->cur_comp_info[c]->dc_tbl_no;
    int ac = jpeg->cur_comp_info[c]->ac_tbl_no;
    if (dc >= TABLES || ac >= TABLES) return;
    scan->dc[c] = code_of(jpeg->dc_huff_tbl_ptrs[dc], 0, dc);
    scan->ac[c] = code_of(jpeg->ac_huff_tbl_ptrs[ac], 1, ac);
  }
  int pixels = jpeg->max_h_samp_factor * jpeg->min_DCT_scaled_size;
  if (jpeg->comps_in_scan == 1) pixels = jpeg->min_DCT_scaled_size;
  scan->first_column = left / pixels;
  scan->last_column = (left + width - 1) / pixels;
  scan->bits.next = jpeg->src->next_input_byte;
  scan->bits.end = scan->bits.next + jpeg->src->bytes_in_buffer;
  jpeg->client_data = scan;
  jpeg->entropy->decode_mcu = decode_mcu;
}
