"""A folder for `sys.path`, holding nothing but the stand-in for `sgl_kernel`."""
