//! The cases. The first ones vary one parameter at a time around a limit of 50 % and kernels of 1 ms. In the
//! others, containers run at the same time. There are about 40 cases of 12 s each.

/// How the simulated GPU divides its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// Work runs to its end in the order of submission.
    Fifo,
    /// Processes take turns of 2 ms.
    Slices,
}

impl Device {
    /// Returns arguments for `gpushare-simulator create`.
    pub fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Fifo => &[],
            Self::Slices => &["--device", "slices"],
        }
    }
}

/// The expected result of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Every container gets its share, no more and no less.
    Shares,
    /// Every container gets its share or more, and no GPU time is left unused.
    Everything,
}

/// One container and its program.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Share in percent of the GPU.
    pub cores: u32,
    /// Compute policy: `fixed` or `burst`.
    pub policy: &'static str,
    /// Arguments of the client's `launch`.
    pub words: Vec<&'static str>,
}

/// Containers that run at the same time.
#[derive(Clone, Debug)]
pub struct Case {
    what: String,
    /// The device that the case runs on.
    pub device: Device,
    /// Whether the host's meter runs.
    pub meter: bool,
    /// The containers that run at the same time.
    pub tenants: Vec<Tenant>,
    /// The expected result.
    pub expect: Expect,
}

impl Case {
    /// Returns the name of the case in a table.
    pub fn name(&self) -> String {
        let device = if self.device == Device::Fifo { "FIFO" } else { "slices" };
        let meter = if self.meter { ", meter" } else { "" };
        format!("{}; {device}{meter}", self.what)
    }
}

fn tenant(cores: u32, words: &[&'static str]) -> Tenant {
    Tenant { cores, policy: "fixed", words: words.to_vec() }
}

/// Creates a case with one container.
fn single(what: &str, cores: u32, words: &[&'static str]) -> Case {
    let what = format!("limit {cores}, {what}");
    let tenants = vec![tenant(cores, words)];
    Case { what, device: Device::Fifo, meter: false, tenants, expect: Expect::Shares }
}

/// Creates a case with several containers that run the same program under one policy.
fn several(policy: &'static str, kernel: &'static str, shares: &[u32]) -> Case {
    let tenants = shares.iter().map(|cores| Tenant { policy, ..tenant(*cores, &[kernel]) }).collect();
    let words = shares.iter().map(u32::to_string).collect::<Vec<_>>().join("/");
    let what = format!("{policy} {words}, {kernel}");
    Case { what, device: Device::Fifo, meter: false, tenants, expect: Expect::Shares }
}

/// Lists all cases, in the order in which they are defined.
pub fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for cores in [25, 50, 75] {
        for kernel in ["100us", "1ms", "10ms"] {
            cases.push(single(kernel, cores, &[kernel, "--grid", "132"]));
        }
    }
    for (what, words) in [
        ("1ms, grid 1", ["1ms", "--grid", "1"]),
        ("1ms, grid 4096", ["1ms", "--grid", "4096"]),
        ("1ms, cuLaunchKernelEx", ["1ms", "--way", "ex"]),
        ("1ms, cooperative", ["1ms", "--way", "cooperative"]),
        ("graphs of 4 kernels of 1ms", ["1ms", "--way", "graph"]),
        ("1ms, synchronised each time", ["1ms", "--every", "1"]),
        ("1ms, 2 processes", ["1ms", "--processes", "2"]),
        ("1ms, 4 processes", ["1ms", "--processes", "4"]),
        ("10ms, 4 processes", ["10ms", "--processes", "4"]),
    ] {
        cases.push(single(what, 50, &words));
    }
    cases.extend(["1ms", "10ms"].map(|kernel| several("fixed", kernel, &[30, 70])));
    cases.push(several("fixed", "1ms", &[25, 25, 50]));
    // Cases that are hard because of time slices, and cases that need the host's measurements.
    for meter in [false, true] {
        let sliced = |case: Case| Case { device: Device::Slices, meter, ..case };
        cases.push(sliced(single("1ms", 50, &["1ms"])));
        cases.push(sliced(single("1ms, 4 processes", 50, &["1ms", "--processes", "4"])));
        for kernel in ["1ms", "10ms"] {
            cases.push(sliced(several("fixed", kernel, &[30, 70])));
            cases.push(sliced(several("fixed", kernel, &[25, 25, 50])));
        }
    }
    let metered = |case: Case| Case { meter: true, ..case };
    cases.push(metered(single("1ms", 50, &["1ms"])));
    cases.push(metered(several("fixed", "1ms", &[25, 25, 50])));
    let everything = |case: Case| Case { expect: Expect::Everything, ..metered(case) };
    cases.push(everything(several("burst", "1ms", &[30])));
    cases.push(everything(several("burst", "1ms", &[30, 70])));
    cases.push(everything(several("burst", "1ms", &[30, 30])));
    cases.push(everything(several("burst", "10ms", &[25, 25])));
    cases
}
