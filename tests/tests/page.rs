//! The meter's page in a real browser: on a desk and on a phone, light and dark, with scripts and without.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{eventually, run};
use gpushare_tests::needs::{self, Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::python;
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use gpushare_tests::service::{Service, free_address};
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox, Need::Chromium, Need::Python, Need::Curl];
const SOON: Duration = Duration::from_secs(20);
/// What an engine could let through as a name, made to act in a page.
const HOSTILE: &str =
    "\"'><script>document.title='evil'</script><img/src=http://evil.example/x/onerror=document.title='evil'>";
/// What is asked for in vain; it would end its line, turn what follows round and colour it.
const NO_AMOUNT: &str = "4<b>GiB</b>\u{202e}\u{1b}[31m";
/// The parts of a GPU's memory, 80 GiB, that each share is granted and uses, by GPU. A context takes 520 MiB.
const WIDTHS: [&[(f64, f64)]; 2] =
    [&[(0.1, 1544.0 / 81920.0), (0.2, 16020.0 / 81920.0)], &[(0.5, 21000.0 / 81920.0)]];

/// A container that holds `size` of `memory` on a GPU.
fn share(name: &str, gpu: &str, memory: &str, size: &str) -> Bundle {
    let probe = ["/bin/gpushare-simulator", "probe", "--hold", "1000", "--allocate", size];
    let bundle = Bundle::with_probe().annotation("nerdctl/name", name).annotation("nerdctl/image", "cuda:12");
    bundle.env("GPUSHARE_DEVICES", gpu).env("GPUSHARE_MEMORY", memory).args(&probe)
}

/// What a browser shows of the page at `url`, by the name of each look. Its pictures are left in target/tmp/page.
fn looks(url: &str) -> Value {
    let pictures = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page");
    fs::create_dir_all(&pictures).expect("a folder can be made");
    let home = Scratch::new("browser");
    let mut browser = Command::new(python::interpreter());
    browser.arg(python::program("look_at_page.py")).arg(needs::chromium().expect("it is there"));
    browser.arg(url).arg(&pictures).env("HOME", home.path());
    let told = run(&mut browser).expect_success("a browser").stdout;
    serde_json::from_str(&told).expect("JSON")
}

/// Whether the bars of a look are as wide as [`WIDTHS`] says.
fn are_wide(bars: &Value) -> bool {
    let is_wide = |seen: &Value, want: f64| seen.as_f64().is_some_and(|seen| (seen - want).abs() < 0.002);
    let is_bar = |bar: &Value, want: &[(f64, f64)]| {
        let shares = bar.as_array().expect("shares");
        shares.len() == want.len()
            && shares
                .iter()
                .zip(want)
                .all(|(share, want)| is_wide(&share[0], want.0) && is_wide(&share[1], want.1))
    };
    (0..WIDTHS.len()).all(|gpu| is_bar(&bars[gpu], WIDTHS[gpu]))
}

#[test]
#[ignore = "needs root, runc and Chromium: runs containers and a browser"]
fn the_page_is_whole_in_a_browser_and_no_name_acts_in_it() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::create(2, MODEL, "80GiB");
    let address = free_address();
    let url = format!("http://{address}/");
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundles = [
        share("web", "0", "8GiB", "1GiB").env("GPUSHARE_CORES", "30"),
        share("full", "0", "16GiB", "15500MiB").annotation("nerdctl/compose-project", "shop"),
        share(HOSTILE, "1", "40GiB", "20480MiB").annotation("nerdctl/compose-project", HOSTILE),
    ];
    let _containers = bundles.each_ref().map(|bundle| runtime.run(bundle));
    let refused = share(HOSTILE, "0", NO_AMOUNT, "1GiB");
    let _ = runtime.create(&refused).expect_err("it asks for no amount");
    let _meter = Service::start(&["meter", "--listen", &address], node.config(), "answering");
    let memory = ["1544 MiB of 8 GiB", "16020 MiB of 16 GiB", "21000 MiB of 40 GiB"];
    let page = || run(Command::new("/usr/bin/curl").args(["--silent", &url])).expect_success("curl").stdout;
    // A line takes two moments.
    let is_ready = |page: &str| memory.iter().chain(&["<polyline"]).all(|text| page.contains(text));
    assert!(eventually(SOON, || is_ready(&page())), "{}", page());

    let all = looks(&url);
    let names = ["web\ncuda:12", "full\ncuda:12 · shop", &format!("{HOSTILE}\ncuda:12 · {HOSTILE}")];
    for (look, ground, renewed) in [
        ("desk-light", "rgb(255, 255, 255)", "yes"),
        ("desk-dark", "rgb(20, 23, 27)", "yes"),
        ("phone-light", "rgb(255, 255, 255)", "yes"),
        ("phone-dark-without-scripts", "rgb(20, 23, 27)", "never"),
    ] {
        let seen = &all[look];
        let about = || format!("{look}: {seen:#}");
        assert_eq!((&seen["background"], &seen["renewed"]), (&json!(ground), &json!(renewed)), "{}", about());
        // Names are text, and nothing of theirs is a part of the page or was asked for.
        assert_eq!(
            (&seen["title"], &seen["foreign"]),
            (&json!("GPUs of this node"), &json!([])),
            "{}",
            about()
        );
        let asked: Vec<&str> =
            seen["asked"].as_array().expect("addresses").iter().filter_map(Value::as_str).collect();
        assert!(asked.contains(&&*url) && asked.iter().all(|asked| asked.starts_with(&url)), "{}", about());
        for (row, (name, memory)) in names.iter().zip(memory).enumerate() {
            let row = &seen["rows"][row];
            let memory = format!("{memory}\ncontexts 520 MiB · held by library");
            assert_eq!((&row[0], &row[2]), (&json!(name), &json!(memory)), "{}", about());
        }
        let refused = seen["refused"][0].as_str().expect("a refusal");
        let is_told = refused.starts_with(HOSTILE) && refused.contains("4<b>GiB</b>\\u{202e}\\u{1b}[31m");
        assert!(is_told && refused.contains("unknown unit"), "{}", about());
        assert!(are_wide(&seen["bars"]), "{}", about());
        let lines = seen["lines"].as_array().expect("lines");
        assert!(lines.len() == 4 && lines.iter().all(|points| points.as_u64() > Some(1)), "{}", about());
        assert_eq!(seen["overflow"], 0, "it can be moved sideways: {}", about());
    }
}
