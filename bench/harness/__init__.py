"""What programs that measure and engine tests share: servers, models, methods."""
