// SPDX-License-Identifier: BSD-3-Clause
//! Links with the library of the installed package. APEX_ROOT is its prefix; LIBTORCH, where torch
//! is installed in another folder than apex, is that of torch.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-env-changed=APEX_ROOT");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let Ok(apex) = env::var("APEX_ROOT") else {
        eprintln!("set APEX_ROOT to what `python -m apex.cmake_dir` prints");
        std::process::exit(1);
    };
    let library = format!("{apex}/lib/libapex_parallel.so");
    if !Path::new(&library).exists() {
        eprintln!("{library} does not exist: is APEX_ROOT right, and apex a shared library?");
        std::process::exit(1);
    }
    println!("cargo:rustc-link-search=native={apex}/lib");
    println!("cargo:rustc-link-lib=dylib=apex_parallel");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{apex}/lib");
    if let Ok(torch) = env::var("LIBTORCH") {
        // Named by the program, because the library looks for them beside itself only.
        println!("cargo:rustc-link-arg=-L{torch}/lib");
        println!("cargo:rustc-link-arg=-Wl,--no-as-needed,-ltorch_cpu,-lc10,--as-needed");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{torch}/lib");
    }
}
