//! The data objects that the real library exports for debuggers. Nothing in this library reads or writes
//! them.

use std::sync::atomic::AtomicU8;

macro_rules! objects {
    ($($name:ident: $size:literal),* $(,)?) => {$(
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        pub static $name: [AtomicU8; $size] = [const { AtomicU8::new(0) }; $size];
    )*};
}

objects! {
    cudbgApiClientPid: 4,
    cudbgApiClientRevision: 4,
    cudbgAttachHandlerAvailable: 4,
    cudbgDebuggerCapabilities: 4,
    cudbgDebuggerInitialized: 4,
    cudbgDetachSuspendedDevicesMask: 4,
    cudbgEnableIntegratedMemcheck: 4,
    cudbgEnableLaunchBlocking: 4,
    cudbgEnablePreemptionDebugging: 4,
    cudbgInjectionPath: 4096,
    cudbgIpcFlag: 4,
    cudbgReportDriverApiErrorFlags: 4,
    cudbgReportedDriverApiErrorCode: 8,
    cudbgReportedDriverApiErrorFuncNameAddr: 8,
    cudbgReportedDriverApiErrorFuncNameSize: 8,
    cudbgReportedDriverInternalErrorCode: 8,
    cudbgResumeForAttachDetach: 4,
    cudbgRpcEnabled: 4,
    cudbgSessionId: 4,
    cudbgUseExternalDebugger: 4,
}
