"""Layer segments of pages in host memory <-> contiguous rows on the device."""
