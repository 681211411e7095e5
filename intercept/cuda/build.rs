//! Links the library as the container's `libcuda.so.1`.

#[path = "../link.rs"]
mod link;

fn main() {
    link::build(&link::Library {
        soname: "libcuda.so.1",
        driver: gpushare_region::path::DRIVER_CUDA,
        module: "cuda",
        exports: gpushare_intercept::cuda::HOOKED,
    });
}
