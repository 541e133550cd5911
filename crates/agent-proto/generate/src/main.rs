//! Generates the message types of `sandhold-agent-proto`.

use std::{error::Error, fs, path::Path};

use buffa_codegen::{CodeGenConfig, GeneratedFileKind};
use prost::Message as _;

const PROTO_FILES: [&str; 2] = ["process/process.proto", "filesystem/filesystem.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let proto = package.join("proto");
    let descriptors = protox::compile(PROTO_FILES, [&proto])?.encode_to_vec();
    let descriptors = buffa_codegen::tooling_decode_options()?
        .decode_from_slice::<buffa_codegen::generated::descriptor::FileDescriptorSet>(
            &descriptors,
        )?;

    // Messages only. Views, setters, text format and registries would be twenty times the code,
    // and the services are short enough to be registered by hand.
    let mut config = CodeGenConfig::default();
    config.generate_views = false;
    config.generate_json = true;
    config.generate_text = false;
    config.generate_with_setters = false;
    config.generate_reflection = false;
    config.emit_register_fn = false;
    config.preserve_unknown_fields = false;
    config.file_per_package = true;

    let output = package.join("src/generated");
    fs::create_dir_all(&output)?;
    let names = PROTO_FILES.map(String::from);
    for file in buffa_codegen::generate(&descriptors.file, &names, &config)? {
        if file.kind == GeneratedFileKind::PackageMod {
            fs::write(output.join(&file.name), file.content)?;
        }
    }
    Ok(())
}
