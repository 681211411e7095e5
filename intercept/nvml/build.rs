//! Links the library as the container's `libnvidia-ml.so.1`.

#[path = "../link.rs"]
mod link;

fn main() {
    link::build(&link::Library {
        soname: "libnvidia-ml.so.1",
        driver: gpushare_region::path::DRIVER_NVML,
        module: "nvml",
        exports: gpushare_intercept::nvml::HOOKED,
    });
}
