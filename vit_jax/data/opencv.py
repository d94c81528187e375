"""The package cv2 without its own threads: images are the tasks."""

import cv2

# At the import, as it crashes if a thread is inside OpenCV meanwhile.
cv2.setNumThreads(0)
