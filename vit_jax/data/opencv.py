"""The package cv2 without its own threads: images are the tasks.

The import sets this once, before any thread can be inside OpenCV: it crashes
when the number changes meanwhile.
"""

import cv2

cv2.setNumThreads(0)
