//! What a program in a container sees of its GPU: the answers of `gpushare-simulator probe`, an ordinary
//! client of libcuda and libnvidia-ml.

use serde_json::Value;

use crate::runtime::Container;

/// Memory that the simulated driver reports as a GPU's or instance's and that no program can allocate, in bytes.
pub const UNUSABLE: u64 = 16 << 20;
/// One gibibyte, in bytes.
pub const GIB: u64 = 1 << 30;
/// The driver's word for an allocation that was granted.
pub const SUCCESS: &str = "CUDA_SUCCESS";
/// The driver's word for an allocation beyond the limit.
pub const OUT_OF_MEMORY: &str = "CUDA_ERROR_OUT_OF_MEMORY";

/// The answers of the two libraries in one container.
#[derive(Clone, Debug)]
pub struct Report(Value);

impl Report {
    /// Runs the client in `container`; it tries to allocate each of `sizes` (such as `29GiB`) in turn,
    /// keeping what it gets.
    ///
    /// # Panics
    /// When the driver does not answer.
    #[must_use]
    pub fn of(container: &Container<'_>, sizes: &[&str]) -> Self {
        let mut args = vec!["/bin/gpushare-simulator", "probe", "--json"];
        args.extend(sizes.iter().flat_map(|size| ["--allocate", *size]));
        Self::parse(&container.exec(&args).expect_success("the CUDA client in the container").stdout)
    }

    /// The answers that the client printed.
    ///
    /// # Panics
    /// When they have another form.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        Self(
            serde_json::from_str(text.trim())
                .unwrap_or_else(|error| panic!("no JSON from the client: {error}: {text}")),
        )
    }

    /// The number called `name`: `devices`, `device_total`, `memory_free`, `memory_total`, `nvml_devices`,
    /// `nvml_total`, `nvml_used`; memory in bytes.
    ///
    /// # Panics
    /// When the client gave no such answer.
    #[must_use]
    pub fn number(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("no {name} in {}", self.0))
    }

    /// The text called `name`: `uuid`, `instance`, `name`.
    ///
    /// # Panics
    /// When the client gave no such answer.
    #[must_use]
    pub fn text(&self, name: &str) -> &str {
        self.0[name].as_str().unwrap_or_else(|| panic!("no {name} in {}", self.0))
    }

    /// The driver's results, in the order of the sizes asked.
    ///
    /// # Panics
    /// When the client gave none.
    #[must_use]
    pub fn allocations(&self) -> Vec<String> {
        let list = self.0["allocate"].as_array().unwrap_or_else(|| panic!("no allocations in {}", self.0));
        list.iter().map(|one| one["result"].as_str().unwrap_or_default().to_owned()).collect()
    }

    /// Asserts that CUDA shows a whole GPU on which programs can allocate `bytes`, and NVML no less.
    ///
    /// # Panics
    /// When it shows another.
    pub fn assert_whole(&self, bytes: u64) {
        for name in ["device_total", "memory_total"] {
            assert_eq!(self.number(name), bytes + UNUSABLE, "{name} of {}", self.0);
        }
        assert!(self.number("nvml_total") >= bytes + UNUSABLE, "{}", self.0);
    }

    /// Asserts that every way to ask for the size of the GPU gives `bytes`.
    ///
    /// # Panics
    /// When one differs.
    pub fn assert_size(&self, bytes: u64) {
        for name in ["device_total", "memory_total", "nvml_total"] {
            assert_eq!(self.number(name), bytes, "{name} of {}", self.0);
        }
    }
}
