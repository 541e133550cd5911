//! `/files`: the contents of files over plain HTTP (wire contract 2.4).

pub mod signature;
