"""Session memory: sessions with a window, an archive on disk, recall, parking and restoring."""
