//! One container's two files, as the host creates them.

use std::ffi::{CStr, CString};
use std::io::Write;

use gpushare_intercept::book::Book;
use gpushare_region::{
    ComputePolicy, DeviceLimits, USAGE_LEN, Usage, empty_usage_header, encode_limits, read_usage,
};

pub const MIB: u64 = 1 << 20;
pub const UUID: [u8; 16] = [7; 16];

pub type Files = (&'static CStr, &'static CStr);

/// One container's two files.
pub struct Container {
    pub folder: tempfile::TempDir,
}

impl Container {
    pub fn new(memory_bytes: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let policy = ComputePolicy::None;
        let device = DeviceLimits {
            uuid: UUID,
            memory_bytes,
            cores_percent: 100,
            policy,
            priority: 5,
            ceiling_percent: 100,
            most_bytes: 0,
        };
        std::fs::write(folder.path().join("limits"), encode_limits(&[device], 0).unwrap()).unwrap();
        let mut usage = std::fs::File::create(folder.path().join("usage")).unwrap();
        usage.write_all(&empty_usage_header()).unwrap();
        usage.set_len(USAGE_LEN as u64).unwrap();
        Self { folder }
    }

    pub fn files(&self) -> Files {
        let path = |name: &str| {
            let path = self.folder.path().join(name).into_os_string().into_encoded_bytes();
            &*Box::leak(CString::new(path).unwrap().into_boxed_c_str())
        };
        (path("limits"), path("usage"))
    }

    pub fn usage(&self) -> Usage {
        read_usage(&std::fs::read(self.folder.path().join("usage")).unwrap()).unwrap()
    }
}

pub fn open(files: Files) -> Book {
    Book::open(files.0, files.1)
}
